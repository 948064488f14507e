"""Memory that the I/O process has lent to a process of the engine that ends."""

from __future__ import annotations

import asyncio

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.io_process.protocol import NO_PIECE, ProtocolError
from offload_core.io_process.serving.lendings import Lendings
from offload_core.tiers.calls.lent_objects import Lent, WantedObject
from offload_core.tiers.storage import LocalStorage, StorageEvents
from offload_core.tiers.tier_backend import TierBackend

KEY = ObjectKey("ab" * 32, "full-u256", bytes(32))
NBYTES = 4096
TIER, NUMBER = 3, 7


@pytest.fixture
def storage() -> LocalStorage:
    """A ``cpu`` tier with room for one object, as the I/O process has it."""
    config = load_config({"backends": [{"name": "cpu", "type": "cpu", "capacity": NBYTES}]})
    (tier,) = config.tiers
    backend = TierBackend(tier, config.settings.limits, None, lambda change: None, lends_to_processes=True)
    changes = StorageEvents(lambda keys: None, lambda change: None)
    return LocalStorage(tier, config.settings.limits, None, changes, backend=backend)


async def _reserve(lendings: Lendings, storage: LocalStorage) -> int:
    wanted = [WantedObject(KEY, NBYTES)]
    (grant,), (offset,) = await lendings.keep(TIER, NUMBER, storage, [storage.reserve(wanted)])
    assert grant.outcomes == [None]
    return offset


async def _has_room(storage: LocalStorage) -> bool:
    grant = await storage.reserve([WantedObject(KEY, NBYTES)])
    await grant.release()
    return grant.outcomes == [None]


def test_the_memory_of_a_process_that_ends_is_given_back_after_its_calls(storage: LocalStorage) -> None:
    async def run() -> None:
        await storage.open()
        lendings, call_may_end = Lendings(), asyncio.Event()
        await _reserve(lendings, storage)
        call = asyncio.create_task(_wait_for(call_may_end))
        giving_back = asyncio.create_task(lendings.give_all_back({call}))
        await asyncio.sleep(0)
        assert not await _has_room(storage), "the call may still use the memory"
        call_may_end.set()
        await giving_back
        assert await _has_room(storage)
        await storage.close()

    asyncio.run(run())


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def test_memory_that_is_not_lent_cannot_be_stored(storage: LocalStorage) -> None:
    async def run() -> None:
        await storage.open()
        lendings = Lendings()
        offset = await _reserve(lendings, storage)
        assert len(lendings.view(TIER, NUMBER, offset, NBYTES)) == NBYTES
        for tier, number, place, nbytes in (
            (TIER + 1, NUMBER, offset, NBYTES),
            (TIER, NUMBER + 1, offset, NBYTES),
            (TIER, NUMBER, offset + 4096, NBYTES),
            (TIER, NUMBER, offset, NBYTES - 1),
            (TIER, NUMBER, NO_PIECE, NBYTES),
        ):
            with pytest.raises(ProtocolError, match="has not lent"):
                lendings.view(tier, number, place, nbytes)
        await lendings.give_back(TIER, NUMBER)
        with pytest.raises(ProtocolError, match="has not lent"):
            lendings.view(TIER, NUMBER, offset, NBYTES)
        await lendings.give_back(TIER, NUMBER)  # harmless when repeated
        await storage.close()

    asyncio.run(run())


def test_nothing_is_kept_of_a_call_that_fails(storage: LocalStorage) -> None:
    async def fail() -> Lent[StoreOutcome]:
        raise OSError("the medium is gone")

    async def run() -> None:
        await storage.open()
        lendings = Lendings()
        calls = [storage.reserve([WantedObject(KEY, NBYTES)]), fail()]
        with pytest.raises(OSError, match="is gone"):
            await lendings.keep(TIER, NUMBER, storage, calls)
        assert await _has_room(storage)
        await storage.close()

    asyncio.run(run())


def test_an_absent_object_is_a_miss_and_not_lent(storage: LocalStorage) -> None:
    async def run() -> None:
        await storage.open()
        lendings = Lendings()
        (loan,), offsets = await lendings.keep(TIER, NUMBER, storage, [storage.borrow([WantedObject(KEY, NBYTES)])])
        assert loan.outcomes == [LoadOutcome.MISS]
        assert offsets == [NO_PIECE]
        await storage.close()

    asyncio.run(run())


def test_an_object_of_another_size_is_not_lent(storage: LocalStorage) -> None:
    """An ordinary load then finds out whether it is damaged."""

    async def run() -> None:
        await storage.open()
        await storage.backend.prepare_store([KEY], [NBYTES])
        await storage.backend.store([KEY], [memoryview(bytes(NBYTES))])
        loan = await storage.borrow([WantedObject(KEY, NBYTES - 1)])
        assert loan.outcomes == [None]
        assert loan.views == [None]
        await loan.release()
        await storage.close()

    asyncio.run(run())
