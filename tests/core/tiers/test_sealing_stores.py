"""Stores that seal: which tiers take unsealed objects, and the bytes that arrive."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import Backend, BackendContext, BackendType, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import StoreSeal
from offload_core.api.wrapper import BackendWrapper
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, MemoryBackend, MemoryOptions, key
from tests.support.staged_objects import StagedObjects

SECONDS = 30


class SealingBackend(MemoryBackend):
    """Has stores that seal."""

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        self.seals = seals
        for name, buffer, seal in zip(keys, buffers, seals, strict=True):
            stored = bytearray(len(buffer))
            for offset, part in seal.parts(buffer):
                stored[offset : offset + len(part)] = part
            self.objects[name] = bytes(stored)
        return self._result("store_and_seal", [StoreOutcome.STORED] * len(keys))


class StoresOtherwise(SealingBackend):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await super().store(keys, buffers)


class WrapperOfStores(BackendWrapper):
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        return await super().store(keys, buffers)


class Rig(StagedObjects):
    """A tier over a backend of a class, perhaps wrapped, and staging for its objects."""

    def __init__(self, io: IoLoop) -> None:
        super().__init__()
        self.io = io
        self.tiers: list[Tier] = []

    def tier(
        self,
        backend_class: type[MemoryBackend] = SealingBackend,
        wrap: Callable[[Backend[Any]], Backend[Any]] = lambda inner: inner,
    ) -> tuple[Tier, MemoryBackend]:
        made: list[MemoryBackend] = []

        def construct(options: MemoryOptions, context: BackendContext) -> Backend[Any]:
            made.append(backend_class(options, context))
            return wrap(made[-1])

        config = BackendConfig.model_validate({"name": "memory", "type": "memory"})
        backend_type = BackendType("memory", construct, MemoryOptions)  # type: ignore[arg-type]
        self.tiers.append(Tier(TierConfig(config, backend_type, MemoryOptions()), LIMITS, Counters()))
        self.run(self.tiers[-1].open())
        return self.tiers[-1], made[0]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def unsealed(self, number: int) -> StagedObject:
        staged = self.staged(number)
        staged.lease.tensor[HEADER_BYTES:] = number
        return replace(staged, unsealed=True)


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io)
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


def test_unsealed_objects_arrive_sealed_and_sealed_ones_among_them_too(rig: Rig) -> None:
    tier, backend = rig.tier()
    assert tier.seals_stores
    assert rig.run(tier.store([rig.unsealed(1), rig.sealed(2), rig.unsealed(3)])) == [True] * 3
    for number in (1, 2, 3):
        object_format.verify(memoryview(backend.objects[key(number)]), key(number))
    assert backend.calls[-1] == "store_and_seal"


def test_sealed_objects_alone_are_stored_as_ever(rig: Rig) -> None:
    tier, backend = rig.tier()
    assert rig.run(tier.store([rig.sealed(1)])) == [True]
    assert backend.calls[-1] == "store"


def test_a_seal_that_a_backend_keeps_is_of_no_use_after_the_call(rig: Rig) -> None:
    tier, backend = rig.tier()
    staged = [rig.unsealed(1), rig.unsealed(1)]
    assert rig.run(tier.store(staged)) == [True, True]
    staged[0].lease.tensor.fill_(0x77)  # another owner
    backend.seals[0].seal()  # type: ignore[attr-defined]
    assert set(staged[0].lease.tensor.tolist()) == {0x77}


@pytest.mark.parametrize(
    ("backend_class", "wrap", "seals"),
    [
        (SealingBackend, lambda inner: inner, True),
        (SealingBackend, BackendWrapper, True),
        (MemoryBackend, lambda inner: inner, False),
        (MemoryBackend, BackendWrapper, False),
        (StoresOtherwise, lambda inner: inner, False),
        (SealingBackend, WrapperOfStores, False),
    ],
)
def test_a_tier_seals_if_no_change_of_its_stores_is_bypassed(
    rig: Rig,
    backend_class: type[MemoryBackend],
    wrap: Callable[[Backend[Any]], Backend[Any]],
    seals: bool,
) -> None:
    assert rig.tier(backend_class, wrap)[0].seals_stores is seals


@pytest.mark.parametrize(("keys", "seals"), [({}, True), ({"compression": "zstd"}, False)])
def test_a_tier_that_compresses_does_not_seal(rig: Rig, tmp_path: Path, keys: dict[str, Any], seals: bool) -> None:
    config = load_config(
        {"backends": [{"name": "d", "type": "disk", "path": str(tmp_path), "direct_io": "off", **keys}]}
    )
    rig.tiers.append(tier := Tier(config.tiers[0], LIMITS, Counters()))
    rig.run(tier.open())
    assert tier.seals_stores is seals


def test_a_backend_without_stores_that_seal_says_so(rig: Rig) -> None:
    _, backend = rig.tier(MemoryBackend)
    with pytest.raises(NotImplementedError, match=r"tier 'memory': MemoryBackend has no stores that seal"):
        rig.run(backend.store_and_seal([], [], []))
