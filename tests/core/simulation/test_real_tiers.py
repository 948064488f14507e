"""The simulator, compared with itself over a real disk tier with its default options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner
from offload_core.runtime.threads import DaemonExecutor
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import path_rules
from offload_core.simulation.simulator import Simulation, SimulationResult
from offload_core.simulation.tier_stack import TierStack
from tests.support.geometries import FULL, window
from tests.support.prompt_traces import conversations, trace_of

OBJECT_BYTES = 512


class DiskTier(BoundedTier):
    """A real disk tier in place of a simulated one."""

    def __init__(self, folder: Path, capacity_bytes: int, runner: asyncio.Runner) -> None:
        super().__init__(capacity_bytes, "lru")
        options = {"name": "nvme", "type": "disk", "path": str(folder), "capacity": capacity_bytes}
        (tier,) = load_config({"backends": [options]}).tiers
        context = BackendContext("nvme", DaemonExecutor(2, "nvme"))
        self._run = runner.run
        self._backend = tier.backend_type.backend(tier.options, context)
        self._run(self._backend.open())
        self._present: set[ObjectKey] = set()
        self.holds = lambda name: _key(name) in self._present

    def load(self, names: Iterable[int], size: int) -> None:
        if keys := [_key(name) for name in names]:
            self._run(self._load(keys, size))

    async def _load(self, keys: list[ObjectKey], size: int) -> None:
        reservation = await self._backend.prepare_load(keys)
        outcomes = await self._backend.load_into(keys, [memoryview(bytearray(size)) for _ in keys])
        await reservation.release()
        assert set(outcomes) == {LoadOutcome.HIT}

    def store(self, name: int, size: int, *, spare: bool) -> None:
        self._run(self._store(_key(name), size, spare))

    async def _store(self, key: ObjectKey, size: int, spare: bool) -> None:
        reservation = await self._backend.prepare_store([key], [size], [spare])
        self._present.difference_update(reservation.evicted)
        self.traffic.evicted_objects += len(reservation.evicted)
        if reservation.outcomes[0] is None:
            assert list(await self._backend.store([key], [memoryview(bytes(size))])) == [StoreOutcome.STORED]
            self._present.add(key)
            self.traffic.written_objects += 1
        await reservation.release()

    def touch(self, name: int, *, spare: bool) -> None:
        if self.holds(name):
            self._run(self._backend.touch([_key(name)], [spare]))

    def close(self) -> None:
        self._run(self._backend.close())


def _key(name: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", name.to_bytes(32, "big"))


def test_a_disk_with_default_watermarks_writes_as_much_as_is_simulated(tmp_path: Path) -> None:
    groups = [GroupGeometry(0, 16, FULL), GroupGeometry(1, 16, window(32))]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=4096, hybrid_chunk_size=16)
    sizes = {pack.name: OBJECT_BYTES for pack in planner.packs}
    requests = trace_of(conversations(8, 6, 64), 16).requests
    capacity = 60 * OBJECT_BYTES

    def serve(tier: BoundedTier) -> SimulationResult:
        stack = TierStack.of_one(tier)
        simulation = Simulation(planner, sizes, 16, stack, path_rules("kept and spare", planner, sizes))
        for request in requests:
            simulation.serve(request)
        return simulation.result

    simulated = serve(BoundedTier(capacity, "lru"))
    with asyncio.Runner() as runner:
        tier = DiskTier(tmp_path / "kv", capacity, runner)
        real = serve(tier)
        tier.close()
    assert simulated.traffic.evicted_objects > 100
    assert abs(real.traffic.written_objects / simulated.traffic.written_objects - 1) < 0.1
