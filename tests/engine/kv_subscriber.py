"""A subscriber of vLLM's KV events in a process of its own: it rebuilds each tier's content from the wire alone.

python -m tests.engine.kv_subscriber ENDPOINT REPLAY_ENDPOINT

It knows nothing of offload-core and imports no vLLM. Commands come as lines, each answered by one line of JSON:

* ``state``: take the batches that are there, and print the content and the number of lost and of replayed batches;
* ``skip N``: ignore the next N batches, as if they were lost;
* ``forget``: forget the content of all media but the GPU's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import zmq

QUIET_MILLISECONDS = 300
REPLAY_MILLISECONDS = 30_000


class Content:
    """The blocks of each medium, tier and group, by hash.

    It counts stores, as vLLM asks of readers of an offloading connector's events: chunks that part in the middle share
    their first blocks.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str | None, int], dict[int, int]] = {}
        """Per place and group, the count of each block."""
        self.parents: dict[int, dict[int, int | None]] = {}
        """Per group, the block before each block."""
        self.groups: dict[int, tuple[str, int]] = {}
        """Kind and block size of each group. The last block of a tail has fewer tokens."""
        self.sizes: dict[int, dict[int, int]] = {}
        """Per group, the tokens of each block."""
        self.problems: list[str] = []

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":  # it has no medium, and comes from the engine's own cache
            self.forget(gpu=True)
            return
        place = (event["medium"], event.get("ownership"), event["group_idx"])
        if place[0] == "GPU":  # the engine's own cache
            return
        counts = self.blocks.setdefault(place, {})
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                counts[block] = counts.get(block, 0) - 1
                if counts[block] <= 0:
                    del counts[block]
            return
        size, tokens = event["block_size"], event["token_ids"]
        if len(tokens) != size * len(event["block_hashes"]):
            self.problems.append(f"{len(tokens)} tokens for {len(event['block_hashes'])} blocks of {size}")
        group = event["group_idx"]
        _, largest = self.groups.get(group, ("", 0))
        self.groups[group] = (event["kv_cache_spec_kind"], max(size, largest))
        self.sizes.setdefault(group, {}).update(dict.fromkeys(event["block_hashes"], size))
        parent = event["parent_block_hash"]
        for block in event["block_hashes"]:
            counts[block] = counts.get(block, 0) + 1
            self.parents.setdefault(group, {})[block] = parent
            parent = block

    def is_tail(self, group: int, block: int) -> bool:
        return self.sizes[group][block] < self.groups[group][1]

    def forget(self, *, gpu: bool) -> None:
        self.blocks = {place: blocks for place, blocks in self.blocks.items() if (place[0] == "GPU") != gpu}


class Subscriber:
    """Follows one publisher, and replays batches that it has missed."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._replay_socket = context.socket(zmq.DEALER)
        self._replay_socket.setsockopt(zmq.RCVTIMEO, REPLAY_MILLISECONDS)
        self._replay_socket.connect(replay_endpoint)
        self._content = Content()
        self._next = 0
        self._skip = self._lost = self._replayed = 0

    def command(self, name: str, *arguments: str) -> dict[str, Any]:
        if name == "skip":
            self._skip = int(arguments[0])
        elif name == "forget":
            self._content.forget(gpu=False)
        while self._socket.poll(QUIET_MILLISECONDS):
            _, number, payload = self._socket.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)
        if name == "state":  # the last batches may be lost too: no later one shows it
            self._replay()
        places, tails = [], []
        for place, blocks in self._content.blocks.items():
            whole = [(block, count) for block, count in blocks.items() if not self._content.is_tail(place[2], block)]
            places.append([*place, whole])
            tails.append([*place, [block for block in blocks if self._content.is_tail(place[2], block)]])
        parents = [[group, [*parents.items()]] for group, parents in self._content.parents.items()]
        problems, self._content.problems = self._content.problems, []
        counts = {"lost": self._lost, "replayed": self._replayed}
        groups = [[group, *shape] for group, shape in self._content.groups.items()]
        content = {"places": places, "tails": tails, "parents": parents, "groups": groups}
        return {**content, "problems": problems, **counts}

    def _take(self, number: int, payload: bytes) -> None:
        if self._skip:
            self._skip -= 1
            return
        if number > self._next:
            self._lost += number - self._next
            self._replay()
        if number >= self._next:
            self._apply(number, payload)

    def _replay(self) -> None:
        self._replay_socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            _, _, number, payload = self._replay_socket.recv_multipart()
            if not payload:
                return
            self._replayed += 1
            self._apply(int.from_bytes(number, "big"), payload)

    def _apply(self, number: int, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self._content.apply(event)
        self._next = number + 1


def main(endpoint: str, replay_endpoint: str) -> None:
    """Follow the publisher until the input ends."""
    subscriber = Subscriber(endpoint, replay_endpoint)
    for line in sys.stdin:
        print(json.dumps(subscriber.command(*line.split())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
