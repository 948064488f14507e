"""Memory that the I/O process has lent, and the end of either side."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.io_process import protocol
from offload_core.io_process.protocol import NO_PIECE, ProtocolError
from offload_core.io_process.serving.lendings import Lendings
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.calls.lent_objects import Lent, WantedObject
from offload_core.tiers.storage import LocalStorage, StorageAwayError, StorageEvents
from offload_core.tiers.tier_backend import TierBackend
from tests.core.io_process.rig import OBJECT_BYTES, SECONDS, Rig, key
from tests.support.polling import wait_until
from tests.support.process_state import own_files

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


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    """A ``cpu`` tier in an I/O process."""
    rig = Rig.of(io, {"name": "ram", "type": "cpu", "capacity": "16MiB"})
    yield rig
    rig.close()


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


def test_memory_from_elsewhere_is_given_back_at_once(storage: LocalStorage) -> None:
    async def reserve_elsewhere() -> Lent[StoreOutcome]:
        lent = await storage.reserve([WantedObject(KEY, NBYTES)])
        return Lent(lent.outcomes, [memoryview(bytearray(NBYTES))], lent.release)

    async def run() -> None:
        await storage.open()
        with pytest.raises(BackendError, match="has lent memory that is no part of its lent_memory"):
            await Lendings().keep(TIER, NUMBER, storage, [reserve_elsewhere()])
        assert await _has_room(storage)
        await storage.close()

    asyncio.run(run())


def test_an_absent_object_is_a_miss_and_not_lent(storage: LocalStorage) -> None:
    async def run() -> None:
        await storage.open()
        lendings = Lendings()
        (loan,), offsets = await lendings.keep(
            TIER, NUMBER, storage, [storage.borrow([WantedObject(KEY, NBYTES)], verify=True)]
        )
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
        loan = await storage.borrow([WantedObject(KEY, NBYTES - 1)], verify=True)
        assert loan.outcomes == [None]
        assert loan.views == [None]
        await loan.release()
        await storage.close()

    asyncio.run(run())


def test_memory_that_a_process_lends_at_its_end_is_not_used(rig: Rig) -> None:
    before = own_files()
    process = rig.process
    (storage,) = process._storages.values()
    storage._forget_lent_memory()

    async def end_right_after_the_answer() -> None:
        session = process._session
        assert session is not None
        assert session._control is not None
        mapping = asyncio.ensure_future(storage.map_lent_memory())
        await asyncio.sleep(0)
        assert select.select([session._control._socket], [], [], SECONDS)[0], "no answer came"
        session.kill()
        session._ended("has ended")  # the loop learns of both at once
        await mapping
        assert not storage.lends

    rig.wait(end_right_after_the_answer())
    wait_until(lambda: storage.lends, "the next process does not lend")
    assert rig.store(1) == [True]
    assert rig.load(1) == [LoadOutcome.HIT]
    assert own_files() - before == Counter()


def test_memory_that_arrives_after_the_tier_was_closed_is_not_kept(rig: Rig) -> None:
    (storage,) = rig.process._storages.values()

    async def close_meanwhile() -> None:
        mapping = asyncio.ensure_future(storage.map_lent_memory())
        await asyncio.sleep(0)
        await storage.close()
        await mapping

    rig.wait(close_meanwhile())
    assert not storage.lends


def test_memory_that_is_mapped_again_replaces_the_former(rig: Rig) -> None:
    """As if the tier is opened a second time, because the first attempt failed after it had mapped the memory."""
    (storage,) = rig.process._storages.values()
    before = own_files()
    rig.wait(storage.map_lent_memory())
    assert storage.lends
    assert own_files() == before


def test_no_process_lends_for_the_memory_of_the_one_before(rig: Rig) -> None:
    """The thread that asks is interrupted for so long that the next process serves when its request goes out."""
    (storage,) = rig.process._storages.values()
    pid, pack = rig.pid, protocol.pack_lending

    def interrupted(number: int) -> bytes:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rig.process.pid not in (None, pid) and storage.lends, "no other process takes over")
        return pack(number)

    ends: list[object] = []
    with mock.patch.object(protocol, "pack_lending", interrupted), pytest.raises(StorageAwayError, match="has ended"):
        storage.start_reserve([WantedObject(key(1), OBJECT_BYTES)], ends.append)
    assert ends == []
    assert rig.store(1) == [True]
    assert rig.load(1) == [LoadOutcome.HIT]
