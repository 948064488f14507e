"""The contract's tests on the reference backend and on each broken one; ``test_teeth.py`` has pytest run them.

The file's name keeps pytest from collecting it by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from offload_core.api.backend import BackendContext, BackendType, LoadReservation, StoreReservation
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.rig.killed_process import Errand, current_errand, hold, hold_in_killed_process
from tests.testing.contract.broken import BROKEN
from tests.testing.contract.reference import MEDIA, REFERENCE, AsyncReference, ReferenceBackend, ReferenceOptions


class TestReference(BackendContract):
    backend_type = REFERENCE
    largest_object_bytes = 16 * 1024 * 1024
    watch_seconds = 0.2

    @pytest.fixture
    def options(self) -> Iterator[dict[str, Any]]:
        medium = secrets.token_hex(8)
        yield {"medium": medium}
        MEDIA.pop(medium, None)

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        found = MEDIA[options["medium"]].objects[key]
        found.content = found.content[: len(found.content) // 2]

    def take_away(self, options: Mapping[str, Any]) -> None:
        MEDIA[options["medium"]].is_gone = True

    def bring_back(self, options: Mapping[str, Any]) -> None:
        MEDIA[options["medium"]].is_gone = False

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        errand = current_errand.get() or Errand()

        async def die() -> None:
            executor = DaemonExecutor(1, "dying")
            backend = self.backend_type.backend(ReferenceOptions(**options), BackendContext("dying", executor))
            assert isinstance(backend, ReferenceBackend)
            await backend.open()
            answer, _ = await hold(backend, keys, nbytes, errand)
            errand.present, errand.outcomes = answer.present, answer.outcomes
            executor.shutdown()
            backend.medium.dead.add(backend.number)

        asyncio.run(die())


class TestReferenceInTwoProcesses(TestReference):
    """Its medium is the memory of one process, although it declares ``shared`` and ``persistent``."""

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        hold_in_killed_process(self.backend_type, options, keys, nbytes)


class TestAsyncReference(TestReference):
    backend_type = BackendType("asyncio", AsyncReference, ReferenceOptions)


class EvictsAndForgetsSizes(ReferenceBackend):
    """Keeps the contract: a medium that evicts by itself need not know the size of an object that is present."""

    capabilities = replace(
        ReferenceBackend.capabilities, bounded=False, spares=False, lends=False, sizes=True, evicts=True
    )

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        reservation = await super().prepare_load(keys)
        reservation.nbytes = tuple(size if at % 2 else None for at, size in enumerate(reservation.nbytes))
        return reservation


class TestEvictingReference(TestReference):
    backend_type = BackendType("evicting", EvictsAndForgetsSizes, ReferenceOptions)


class ReservesSlowly(ReferenceBackend):
    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        await asyncio.sleep(0.4)
        return await super().prepare_store(keys, nbytes, spare)


class TestSlowReference(TestReference):
    backend_type = BackendType("slow", ReservesSlowly, ReferenceOptions)
    test_seconds = 0.2


def class_name(index: int) -> str:
    """Return the test class of ``BROKEN[index]``."""
    return f"TestBroken{index}"


globals().update(
    {
        class_name(index): type(
            class_name(index), (TestReference,), {"backend_type": broken.backend_type, **broken.members}
        )
        for index, broken in enumerate(BROKEN)
    }
)
