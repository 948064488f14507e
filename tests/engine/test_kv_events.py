"""A real subscriber of a real engine's KV events knows exactly the objects that ``offload-core ls`` lists."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.labs import QUICK_LABS
from tests.engine.media import SMALL_BYTES
from tests.support.engine.lab import Lab, count, ours
from tests.support.engine.spec import Round, RunResult
from tests.support.paths import ROOT
from tests.support.polling import wait_until

COMMAND = Path(sys.executable).with_name("offload-core")
RESYNC_SECONDS = 0.2
TAIL = "-tail"
POLICIES = {"full_attention": "full", "sliding_window": "window", "mamba": "state"}
SPARE_ROUNDS = 5


class Told(NamedTuple):
    """The state of the subscriber."""

    places: dict[tuple[str, str, int], Counter[int]]
    """The count of each whole block on each medium, tier and group."""
    tails: dict[tuple[str, str, int], set[int]]
    """The blocks there that are filled in part: each is the last one of a tail."""
    parents: dict[int, dict[int, int | None]]
    """Per group, the block before each block."""
    groups: dict[int, tuple[str, int]]
    """Kind and block size of each group."""
    lost: int
    replayed: int


class SubscriberProcess:
    """The subscriber, in a process that may be stopped."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> Told:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["problems"] == []
        places = {(medium, tier, group): Counter(dict(counts)) for medium, tier, group, counts in answer["places"]}
        tails = {(medium, tier, group): set(blocks) for medium, tier, group, blocks in answer["tails"]}
        parents = {group: dict(before) for group, before in answer["parents"]}
        groups = {group: (kind, block_size) for group, kind, block_size in answer["groups"]}
        return Told(places, tails, parents, groups, answer["lost"], answer["replayed"])

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


@contextmanager
def _subscribed(*endpoints: str) -> Iterator[SubscriberProcess]:
    command = [sys.executable, "-m", "tests.engine.kv_subscriber", *endpoints]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield SubscriberProcess(process)
        finally:
            process.kill()


def _listed(config: Path) -> dict[str, set[int]]:
    """Return the last block hash of each object, by pack, as events shorten it."""
    done = subprocess.run(
        [COMMAND, "ls", config, "--json", "--limit", "0"], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, set[int]] = {}
    for item in json.loads(done.stdout)["objects"]:
        found.setdefault(item["pack"], set()).add(int(item["hash"], 16) & (1 << 64) - 1)
    return found


def _blocks_per_object(pack: str, block_size: int) -> int:
    kind, unit, window = re.fullmatch(r"(\w+)-u(\d+)(?:-w(\d+))?", pack).groups()  # type: ignore[union-attr]
    if kind == "state":
        return 1
    blocks = int(unit) // block_size
    return min(blocks, -(-(int(window) - 1) // block_size)) if window else blocks


def _differences(told: Told, listed: dict[str, set[int]], exact: bool) -> list[str]:
    """Compare the blocks of each group on the disk with those of the listed objects of its pack.

    Every tail is shorter than a block.

    Args:
        exact: compare counts. A subscriber that has begun late knows each object, but may count a shared block too low.
    """
    problems = []
    for index, (kind, block_size) in told.groups.items():
        (pack,) = [name for name in listed if name.startswith(POLICIES[kind]) and not name.endswith(TAIL)]
        place = ("STORAGE", "disk", index)
        blocks, objects = told.places.get(place, Counter()), listed[pack]
        if (tails := told.tails.get(place, set())) != (ends := listed.get(pack + TAIL, set())):
            problems.append(f"group {index}: {len(tails)} tails are announced, and {len(ends)} are there")
        if missing := objects - blocks.keys():
            problems.append(f"group {index}: {len(missing)} of {len(objects)} objects of {pack} are not announced")
            continue
        expected: Counter[int] = Counter()
        for block in objects:
            at: int | None = block
            for _ in range(_blocks_per_object(pack, block_size)):
                assert at is not None
                expected[at] += 1
                at = told.parents[index].get(at)
        if blocks != expected if exact else not blocks.keys() <= expected.keys():
            problems.append(f"group {index}: {blocks.total()} blocks for {expected.total()} of {pack}")
    return problems


class Gates:
    """The files by which the rounds of an engine begin and end when the test says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self, name: str) -> dict[str, Any]:
        return {"begin_file": str(self._folder / f"begin-{name}"), "end_file": str(self._folder / f"end-{name}")}

    @contextmanager
    def all_open_at_the_end(self, names: Iterable[str]) -> Iterator[None]:
        """Let the engine end after a failure of the test too."""
        try:
            yield
        finally:
            self.open(names)

    def open(self, names: Iterable[str]) -> None:
        for name in names:
            Path(self.files(name)["begin_file"]).touch()

    def let_run(self, name: str, engine: Any) -> None:
        self.open([name])
        ended = Path(self.files(name)["end_file"])
        wait_until(lambda: ended.exists() or engine.done(), f"the round {name!r} did not end")
        if engine.done():
            engine.result()


@pytest.mark.parametrize(
    "prefix_match_unit", [None, pytest.param(32, marks=pytest.mark.long)], ids=["chunks", "chunks and tails"]
)
@pytest.mark.parametrize("lab", QUICK_LABS, indirect=True)
def test_a_subscriber_rebuilds_the_content_of_a_tier(lab: Lab, prefix_match_unit: int | None, tmp_path: Path) -> None:
    names = ["stores", "others evict", "stopped", "resync"]
    last = "after the last comparison"  # until then the engine's publisher is there
    gates, config = Gates(tmp_path), tmp_path / "offload.json"
    prompts = {
        "stores": lab.prompts(1283, 2500, 700, family=90, max_tokens=2),
        "others evict": lab.prompts(700, 1283, family=91, max_tokens=2),
        "stopped": lab.prompts(2500, 2300, family=92, max_tokens=2),
        "resync": lab.prompts(700, family=93, max_tokens=16),
        last: lab.prompts(16, family=94, max_tokens=1),
    }
    short = lab.prompts(16, family=95, max_tokens=32)  # steps of the engine, and nothing to store
    spares = {name: [f"{name}, {number}" for number in range(SPARE_ROUNDS)] for name in ("others evict", "resync")}
    rounds = [
        Round.model_validate({"name": name, "prompts": asked, **gates.files(name)})
        for first, own in prompts.items()
        for name, asked in ((first, own), *((spare, short) for spare in spares.get(first, ())))
    ]
    capacity = SMALL_BYTES if lab.name == "gemma3" else SMALL_BYTES // 4  # less than the prompts need
    disk = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv"), "capacity": capacity}
    ram = {"name": "ram", "type": "cpu", "capacity": capacity // 2}
    transfer = ours(
        tmp_path / "kv", backends=[ram, disk], kv_events_resync_seconds=RESYNC_SECONDS, hybrid_chunk_size=lab.block_size
    )
    config.write_text(json.dumps({"backends": [disk]}))
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    events = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1], "hwm": 1}

    with (
        ThreadPoolExecutor(1) as pool,
        gates.all_open_at_the_end([one.name for one in rounds]),
        _subscribed(*endpoints) as subscriber,
    ):
        more = {} if prefix_match_unit is None else {"prefix_match_unit": prefix_match_unit}
        engine = pool.submit(lab.run, rounds, transfer, extra_engine_args={"kv_events_config": events, **more})
        seen = {}

        def look(name: str) -> bool:
            seen[name] = subscriber.ask("state"), _listed(config)
            return not _differences(*seen[name], exact=name != "resync")

        def end(name: str) -> None:
            """Run a round, then the rounds in which the engine makes steps until a whole resync is over."""
            for one in (name, *spares.get(name, ())):
                gates.let_run(one, engine)
                if look(name):
                    break
            gates.open(spares.get(name, ()))

        end("stores")

        subprocess.run([COMMAND, "prune", config, "--max-bytes", str(capacity // 2), "--yes"], check=True, timeout=60)
        subscriber.ask("skip 3")
        end("others evict")

        subscriber.send_signal(signal.SIGSTOP)
        gates.let_run("stopped", engine)
        subscriber.send_signal(signal.SIGCONT)
        look("stopped")

        subscriber.ask("forget")
        end("resync")
        gates.let_run(last, engine)
        result: RunResult = engine.result()

    assert {name: _differences(told, listed, exact=name != "resync") for name, (told, listed) in seen.items()} == {
        name: [] for name in names
    }
    assert any(pack.endswith(TAIL) for _, listed in seen.values() for pack in listed) is (prefix_match_unit is not None)
    for told, _ in seen.values():
        assert told.groups.keys() == set(range(len(result.engine["kv_cache_groups"])))
        assert any(place[:2] == ("CPU", "ram") for place in told.places)
    assert count(result, "evictions") > 0
    lost = [seen[name][0].lost for name in names]
    assert lost[0] < lost[1], "batches were skipped"
    assert lost[-1] <= seen["resync"][0].replayed
