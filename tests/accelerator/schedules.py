"""Random schedules of a transfer engine on a simulated accelerator, whose streams are held and released at every point.

One group, one block per object. The bytes of object ``n`` are row ``n`` of a table on the device. The driver is the
engine: it gives its stream work that writes blocks (by copies from the table) and reads them (by copies to snapshots).
It never looks at a block itself before the end, since that would wait for a stream.

Oracle, by the order of the engine's calls:

- a block that the engine reads has the bytes that were last written or loaded, in spite of all other copies;
- a stored object has the bytes that its block had at the call;
- released staging memory is overwritten at once, so that a copy which still uses it shows;
- each store and each load has one result, and no memory is held in the end;
- no call waits, and after the shutdown no copy goes on.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from offload_core.api.keys import ObjectKey
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.pinned_pieces import PinnedPieces
from offload_core.memory.device.stream_copier import StreamBlockCopier
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_size import STORE_SHARE
from offload_core.objects.format import HEADER_BYTES, seal
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.opening import close_tiers
from offload_core.transfer.loads import LoadJob
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch
from tests.support.accelerator import DEVICE, StreamControl
from tests.support.lending_memory import LendingMemory, Slots, lending_tier, pinned_in_pieces
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item, number_of

PAGE_BYTES = 512
NUM_BLOCKS = 10
NUMBERS = range(1, 16)
LEASE_BYTES = 4096
STAGING_BYTES = 24 * LEASE_BYTES
BUFFER_BYTES = 3 * PAGE_BYTES
SLOTS = 7
"""Objects for which a tier that lends has memory. It evicts for more of them."""
POISON = 0x5B
LOAD_TIMEOUTS = (0.003, SECONDS, SECONDS)


class PoisoningPool(StagingPool):
    """A pool that overwrites released memory, as its next user would."""

    def _release(self, lease: Lease) -> None:
        self.memory[lease.offset : lease.offset + lease.nbytes] = bytes([POISON]) * lease.nbytes
        super()._release(lease)


@cache
def _sealed(number: int, payload: bytes) -> bytes:
    content = bytearray(HEADER_BYTES + len(payload))
    content[HEADER_BYTES:] = payload
    seal(memoryview(content), key(number, PACK))
    return bytes(content)


def sealed(table: torch.Tensor) -> dict[ObjectKey, bytes]:
    """Return all objects of a table, as a tier has them."""
    return {key(number, PACK): _sealed(number, table[number].numpy().tobytes()) for number in NUMBERS}


class Schedule:
    """One random schedule. Each schedule has its own choice of the things that happen.

    Args:
        batched: use batched copies, or torch's.
        lent: the tier lends its memory, in place of staging memory. It needs batched copies.
    """

    def __init__(self, io: IoLoop, control: StreamControl, seed: int, *, batched: bool, lent: bool) -> None:
        self.draw = random.Random(seed)
        self._control = control
        self._io = io
        copy = SwapBlocksBatch(control.swap_blocks_batch, torch.int64, 2) if batched else None
        pinned = PinnedPieces(control)

        def made(caches: CanonicalKVCaches) -> StreamBlockCopier:
            return StreamBlockCopier(caches, BUFFER_BYTES, copy, pinned if batched else None)

        self.rig = Rig(io, page_bytes=PAGE_BYTES, num_blocks=NUM_BLOCKS, make_copier=made, device=DEVICE)
        generator = torch.Generator().manual_seed(7)
        shape = max(NUMBERS) + 1, PAGE_BYTES
        self.table = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
        self._rows = self.table.to(DEVICE)
        keys: Any = {"load_timeout_seconds": self.draw.choice(LOAD_TIMEOUTS), "staging_share": 1.0, "io_threads": 2}
        self.backend = self._add_lending_tier(**keys) if lent else self.rig.add_memory_tier(**keys)
        if self.draw.random() < 0.8:
            self.backend.objects.update(sealed(self.table))
        self.rig.start_with(PoisoningPool(STAGING_BYTES, STORE_SHARE, pinned if batched else control))
        self._pinned = ExitStack()
        if lent:
            slots: Any = self.backend.objects
            self._pinned.enter_context(pinned_in_pieces(slots, pinned))
            storage: Any = self.rig.tiers[0].storage
            storage._lends_pinned_only = False  # all of it is pinned here, and there is no other process
        copier = self.rig.copier
        self._streams: list[Any] = [torch.accelerator.current_stream(), copier._store_stream, copier._load_stream]
        self._held: set[int] = set()
        self.content: dict[int, int] = {}
        """Per block, the object whose bytes it has for the engine."""
        self._loads: dict[int, list[tuple[int, int]]] = {}
        """Per job, its objects and their blocks."""
        self._kept: dict[int, list[int]] = {}
        """Per ended job, its objects that are at hand."""
        self._reads: list[tuple[int, str, torch.Tensor]] = []
        self._offered: Counter[int] = Counter()
        self._results: Counter[int] = Counter()
        self.ended: Counter[str] = Counter()
        """Loads by status."""
        self._job = 0
        self._waited = False
        self._watch = threading.Timer(SECONDS, self._give_up_waiting)
        self._watch.daemon = True
        weights = {
            self._compute: 3, self._read: 3, self._store: 5, self._load: 6, self._cancel: 3, self._step: 6,
            self._hold: 5, self._release_one: 3,
        }  # fmt: skip
        if lent:
            weights |= {self._cancel: 1, self._step: 12, self._copy_kept: 6, self._give_back: 5, self._store: 10}
        rare = (self._hang, self._recover, self._pass_time, self._reset, self._sleep)
        weights.update(dict.fromkeys(self.draw.sample(rare, self.draw.randint(0, len(rare))), 1))
        for action in self.draw.sample((self._store, self._cancel, self._release_one), self.draw.randint(0, 1)):
            weights[action] = 0
        self._actions, self._weights = list(weights), list(weights.values())

    def run(self, steps: int) -> None:
        """Do random things, then shut down at once, or after everything has ended.

        Raises:
            AssertionError: the oracle has found a fault.
        """
        self._watch.start()
        try:
            self._write_all()
            for action in self.draw.choices(self._actions, self._weights, k=steps):
                action()
            if self.draw.random() < 0.5:
                self._everything_ends()
            self._shut_down()
            self._check()
            assert not self._waited, "a call waits for a held stream"
        finally:
            self._watch.cancel()
            self._clear_up()

    def _add_lending_tier(self, **keys: Any) -> LendingMemory:
        config, made = lending_tier(Slots(SLOTS, HEADER_BYTES + PAGE_BYTES), **keys)
        self.rig.add_tier(config)
        return made[0]

    # Work of the engine on its stream

    def _compute(self) -> None:
        """Write a block."""
        free = self._free_blocks()
        if free:
            self._write(self.draw.choice(free), self.draw.choice(NUMBERS))

    def _read(self) -> None:
        """Read the blocks whose content the engine knows, as attention does."""
        for block in self.content:
            self._read_block(block, "read")

    def _write(self, block: int, number: int) -> None:
        self.rig.kv_cache[block].copy_(self._rows[number])
        self.content[block] = number

    def _write_all(self) -> None:
        for block in self._free_blocks():
            self._write(block, self.draw.choice(NUMBERS))

    def _read_block(self, block: int, why: str) -> None:
        snapshot = torch.empty(PAGE_BYTES, dtype=torch.int8, device=DEVICE)
        snapshot.copy_(self.rig.kv_cache[block])
        self._reads.append((self.content[block], f"{why}, block {block}", snapshot))

    def _free_blocks(self) -> list[int]:
        loading = {block for objects in self._loads.values() for _, block in objects}
        return [block for block in range(NUM_BLOCKS) if block not in loading]

    # Calls of the connector

    def _store(self) -> None:
        """Store blocks, and perhaps use them again at once, as after a preemption or the end of a request."""
        blocks = self.draw.sample(sorted(self.content), min(len(self.content), self.draw.randint(1, 3)))
        numbers = {self.content[block]: block for block in blocks}
        objects = [item(number, block=block) for number, block in numbers.items()]
        if self.draw.random() < 0.8:
            self.rig.engine.announce_stores(objects)
            self._wait_for_grants()
        self.rig.engine.submit_stores(objects)
        self._offered.update(numbers.keys())
        for block in blocks:
            if self.draw.random() < 0.5:
                self._write(block, self.draw.choice(NUMBERS))

    def _load(self) -> None:
        """Load into blocks that the engine has just freed, so that its last work on them may still be on its way."""
        free = self._free_blocks()
        blocks = self.draw.sample(free, min(len(free), self.draw.randint(1, 3)))
        numbers = self.draw.sample(NUMBERS, len(blocks))
        pairs = list(zip(numbers, blocks, strict=True))
        for _, block in pairs:
            if self.draw.random() < 0.5:
                self._write(block, self.draw.choice(NUMBERS))
            self.content.pop(block, None)
        self._job += 1
        objects = tuple(item(number, block=block) for number, block in pairs)
        self.rig.engine.submit_load(LoadJob(self._job, "memory", objects, keep=self.draw.random() < 0.8))
        self._loads[self._job] = pairs

    def _copy_kept(self) -> None:
        """Load objects that are at hand, within a step: the engine reads the blocks at once."""
        free = self._free_blocks()
        if self._kept and free:
            number, block = self.draw.choice(self._kept[self.draw.choice(sorted(self._kept))]), self.draw.choice(free)
            self.rig.engine.copy_kept("memory", [item(number, block=block)])
            self.content[block] = number
            self._read_block(block, "kept")

    def _give_back(self) -> None:
        """Keep the objects of a load no longer."""
        if self._kept:
            job = self.draw.choice(sorted(self._kept))
            del self._kept[job]
            self.rig.engine.give_back([job])

    def _wait_for_grants(self) -> None:
        """Let the tier answer an announcement, as it does while the engine computes."""
        grants = self.rig.engine._stores._grants
        limit = time.monotonic() + SECONDS
        while any(one not in grants._answers for one in list(grants._expected)):
            assert time.monotonic() < limit, "an announcement has no answer"
            self.rig.engine.wait_for_arrival(0.0005)

    def _cancel(self) -> None:
        """Cancel a load, whose request was aborted or preempted."""
        if self._loads:
            self.rig.engine.cancel_load(self.draw.choice(sorted(self._loads)))

    def _step(self) -> None:
        self.rig.engine.wait_for_arrival(self.draw.choice((0, 0.001, 0.003)))
        self._poll()

    def _poll(self) -> None:
        for result in self.rig.engine.poll():
            pairs = self._loads.pop(result.job_id)
            self.ended["kept" if result.kept else result.status] += 1
            if result.kept:
                self._kept[result.job_id] = [number for number, _ in pairs]
            for number, block in pairs:
                if result.status == "loaded":
                    self.content[block] = number
                    self._read_block(block, "loaded")
                elif self.draw.random() < 0.8:  # the block belongs to another request at once
                    self._write(block, self.draw.choice(NUMBERS))
        for stored in self.rig.engine.take_store_results():
            self._results[number_of(stored)] += 1

    def _reset(self) -> None:
        """Forget everything, as after new weights: no load goes on, and every block is written anew."""
        for job in self._loads:
            self.rig.engine.cancel_load(job)
        self._poll()
        self.rig.engine.give_back(list(self._kept))
        self._kept.clear()
        self.backend.objects.clear()
        self._write_all()

    def _sleep(self) -> None:
        """Do as a worker that goes to sleep: it ends all work of the device, then discards the KV cache."""
        for job in self._loads:
            self.rig.engine.cancel_load(job)
        self._release_all()
        torch.accelerator.synchronize()
        self._poll()
        self.content.clear()
        self._write_all()

    # Streams, the medium and time

    def _hold(self) -> None:
        index = self.draw.randrange(len(self._streams))
        self._held.add(index)
        self._control.hold(self._streams[index])

    def _release_one(self) -> None:
        if self._held:
            self._release(self.draw.choice(sorted(self._held)))

    def _release(self, index: int) -> None:
        self._held.discard(index)
        self._control.release(self._streams[index])

    def _release_all(self) -> None:
        for index in range(len(self._streams)):
            self._release(index)

    def _hang(self) -> None:
        self.backend.gates[self.draw.choice(("store", "load_into"))].shut()

    def _recover(self) -> None:
        for gate in self.backend.gates.values():
            gate.open()

    def _pass_time(self) -> None:
        time.sleep(0.004)  # past the short deadline

    def _give_up_waiting(self) -> None:
        self._waited = True
        self._release_all()
        self._recover()

    # The end

    def _everything_ends(self) -> None:
        self._recover()
        self._release_all()
        self._until(lambda: not self._loads)
        assert self.rig.engine.drain_stores(SECONDS), "a store never ends"
        self._until(lambda: self.rig.staging.used_bytes == 0)
        self._poll()
        assert self._results == self._offered, "a store has no result, or several"
        self.rig.copier._free_moved()
        assert not self.rig.copier._buffer._slots, "a part of the device buffer is never free again"
        assert not self.rig.engine.jobs.live
        if isinstance(self.backend, LendingMemory):
            self.rig.engine.give_back(list(self._kept))
            self._kept.clear()
            slots = self.backend.slots
            self._until(lambda: slots.borrowed == 0)
        assert self.rig.engine._stores.budget.held_bytes == 0
        self._read()

    def _until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit, "something never ends"
            self.rig.engine.wait_for_arrival(0.002)
            self._poll()

    def _shut_down(self) -> None:
        """Close the engine while streams may be held; they go on a little later."""
        copies = self._streams[1:]
        later = threading.Timer(0.002, self._release_all)
        later.start()
        self.rig.engine.close()
        assert all(stream.query() for stream in copies), "a copy goes on after the shutdown"
        later.join()

    def _check(self) -> None:
        """Compare all bytes."""
        self._recover()
        self._release_all()
        torch.accelerator.synchronize()
        for number, why, snapshot in self._reads:
            assert torch.equal(snapshot.cpu(), self.table[number]), f"{why}: not the bytes of object {number}"
        limit = time.monotonic() + SECONDS
        while self.rig.staging.used_bytes:  # calls that hung at the shutdown keep theirs until they end
            assert time.monotonic() < limit, "a lease is never released"
            time.sleep(0.001)
        for name, stored in self.backend.objects.items():
            number = int.from_bytes(name.chunk_hash, "big")
            right = self.table[number].numpy().tobytes()
            assert stored[HEADER_BYTES:][:PAGE_BYTES] == right, f"object {number} was stored with other bytes"

    def _clear_up(self) -> None:
        self._recover()
        self._release_all()
        torch.accelerator.synchronize()
        self.rig.engine.close()
        self.rig.staging.close()
        self._pinned.close()
        close_tiers(self.rig.tiers, self._io, SECONDS)


def run(io: IoLoop, control: StreamControl, seed: int, steps: int = 30) -> Counter[str]:
    """Run the schedule of a seed; return its loads by status."""
    schedule = Schedule(io, control, seed, batched=bool(seed % 2), lent=seed % 4 == 1)
    schedule.run(steps)
    return schedule.ended
