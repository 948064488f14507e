"""Clauses about calls and media that fail and clients that die: C23, C24, and parts of C5 and C10.

Most of them need a hook of the author.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.capacity import (
    MAX_OBJECTS,
    OBJECT_BYTES,
    fill,
    fitting_objects,
    store_one,
    store_with_patience,
)
from offload_core.testing.contract.checks import contract_test, expect, expect_bytes, expect_results
from offload_core.testing.rig.clients import Client, Rig, content
from offload_core.testing.rig.killed_process import Errand, current_errand

SIZE = 1000
MAX_FAILED_CALLS = 4
"""Thread calls of a preparation that fail, one by one."""
_LOOK_AGAIN_SECONDS = 0.1
_NO_MEDIUM = (
    "no methods take_away(self, options) and bring_back(self, options) that make the medium fail and work again"
)
_NO_DEATH = (
    "no method die_holding(self, options, keys, nbytes) that holds reservations in a client and kills it; "
    "for a medium that processes share, call offload_core.testing.hold_in_killed_process in it"
)


class FailuresContract:
    """A medium that is gone is an error, and the reservations of a dead client are given back."""

    recovery_seconds = 10.0
    """Longest time until a medium that is back works again, and until a dead client's reservations are given back."""

    def take_away(self, options: Mapping[str, Any]) -> None:
        """Make the medium unusable behind the backend's back; override this and :meth:`bring_back` to test C23.

        For example, move the folder away, or stop the server. The contract calls this on a thread of its own.

        Args:
            options: the tier's own keys, which name the medium.
        """
        raise NotImplementedError

    def bring_back(self, options: Mapping[str, Any]) -> None:
        """Make the medium usable again, as it was before :meth:`take_away`."""
        raise NotImplementedError

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        """Hold reservations in another client, which then dies; override this to test C24 and a part of C5.

        The client calls ``prepare_load(keys)`` and ``prepare_store(keys, nbytes)``. It ends as by SIGKILL: it releases
        nothing. :func:`offload_core.testing.hold_in_killed_process` does this on a medium that processes share.

        Args:
            options: the tier's own keys, with a limit.
            keys: all of them absent, or all of them present.
            nbytes: the size of each object.
        """
        raise NotImplementedError

    @contract_test
    async def test_c05_a_process_that_is_killed_sees_objects_and_leaves_its_own(self, lasting_rig: Rig) -> None:
        rig, client = lasting_rig, await lasting_rig.client()
        declared = client.backend.capabilities
        if not (declared.shared or declared.persistent):
            pytest.skip("capabilities shared and persistent are not declared")
        ours, theirs = ({key: content(SIZE, seed) for seed, key in enumerate(rig.keys(2))} for _ in range(2))
        await client.put(ours)
        if not declared.shared:
            await client.close()
        errand = Errand(theirs)
        await self._die_holding(rig, list(ours), [SIZE] * len(ours), errand)
        if errand.present is None:
            pytest.skip("die_holding does not call offload_core.testing.hold_in_killed_process")
        expect_results("C5", "prepare_load in another process", errand.present, [True] * len(ours))
        expect_results("C5", "store in another process", errand.outcomes, [StoreOutcome.STORED] * len(theirs))
        reader = client if declared.shared else await rig.client()
        for key, wanted in theirs.items():
            outcome, got = await reader.get(key, SIZE)
            expect(
                outcome is LoadOutcome.HIT,
                f"C5: a process was killed after it had stored an object; a load answered {outcome.name}, not HIT",
            )
            expect_bytes("C5", "an object of a process that was killed", got, wanted)

    @contract_test
    async def test_c10_a_preparation_that_fails_keeps_nothing(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        before = await _granted(bounded_rig, client)
        for number in range(1, MAX_FAILED_CALLS + 1):
            keys = bounded_rig.keys(before // 2 + 1)
            await _failing(client, number, client.prepare_store(keys, [OBJECT_BYTES] * len(keys)))
        await bounded_rig.settle()
        after = await _granted(bounded_rig, client)
        expect(
            after == before,
            f"C10: prepare_store failed at one of its first {MAX_FAILED_CALLS} thread calls each time; "
            f"{after} objects fit where {before} fitted before",
        )
        keys = bounded_rig.keys(before + 1)
        await client.store(dict.fromkeys(keys[:-1], bytes(OBJECT_BYTES)))
        if not await store_with_patience(client, keys[-1]):
            return  # the medium does not evict, so pins change nothing
        there = await client.present(keys)
        for number in range(1, MAX_FAILED_CALLS + 1):
            await _failing(client, number, client.prepare_load(there))
        expect(
            await store_with_patience(client, bounded_rig.key()),
            f"C10: prepare_load of {len(there)} objects failed at one of its first {MAX_FAILED_CALLS} thread calls "
            "each time, and the medium evicts none of them any more",
        )

    @contract_test
    async def test_c23_a_medium_that_is_gone_is_no_miss(self, rig: Rig) -> None:
        client = await rig.client()
        key, absent, new = rig.keys(3)
        await client.put({key: content(SIZE)})
        async with client.loading([key]), client.storing([new], [SIZE]), self._gone(rig):
            answers: dict[str, Any] = {}
            for name, call in {
                "contains": lambda: client.contains([absent]),
                "prepare_load": lambda: _prepared(client, [absent]),
                "load_into": lambda: client.load_into([key], [memoryview(bytearray(SIZE))]),
            }.items():
                with suppress(Exception):
                    answers[name] = await call()  # type: ignore[no-untyped-call]
            with suppress(Exception):
                (outcome,) = await client.store_from([new], [memoryview(bytearray(SIZE))])
                if outcome is not StoreOutcome.REJECTED:
                    answers["store"] = outcome.name
            if client.backend.capabilities.lists:
                with suppress(Exception):
                    answers["list_objects"] = await client.listed()
            with suppress(Exception):
                await client.delete([key])
                answers["delete"] = "without an error"
        given = ", ".join(f"{name} answered {answer}" for name, answer in answers.items())
        expect(not answers, f"C23: the medium is gone, and {given}; raise an OSError")

    @contract_test
    async def test_c23_open_fails_while_the_medium_is_gone(self, rig: Rig) -> None:
        client = await rig.client()
        await client.close()
        late = rig.construct()
        async with self._gone(rig):
            with suppress(Exception):
                await late.open()
        opened = late.opened
        expect(not opened, "C23: open returned while the medium was gone; use the medium in open, and raise an OSError")
        try:
            await late.close()
        except Exception as error:
            raise AssertionError(
                f"C23: open failed, and close raised {type(error).__name__}: {error}; it should be harmless (C13)"
            ) from error

    @contract_test
    async def test_c23_every_error_is_an_os_error(self, rig: Rig) -> None:
        client = await rig.client()
        calls = await _calls(rig, client)
        reached = 0
        for name, call in calls.items():
            client.calls.script(fail=range(1, 100))
            await _expect_os_error(name, call)
            reached += client.calls.count
            client.calls.open()
        if not self._can_take_away():
            if not reached:
                pytest.skip(f"the backend makes no thread calls that could fail, and has {_NO_MEDIUM}")
            return
        calls = await _calls(rig, client)
        late = rig.construct()
        async with self._gone(rig):
            for name, call in {**calls, "open": late.open}.items():
                await _expect_os_error(name, call)

    @contract_test
    async def test_c23_a_medium_that_is_back_serves_again(self, rig: Rig) -> None:
        client = await rig.client()
        await client.put({rig.key(): content(SIZE)})
        async with self._gone(rig):
            with suppress(Exception):
                await client.contains(rig.keys(1))

        async def serves() -> bool:
            key, wanted = rig.key(), content(SIZE)
            with suppress(Exception):
                await client.put({key: wanted})
                return await client.get(key, SIZE) == (LoadOutcome.HIT, wanted)
            return False

        expect(
            await self._in_time(serves),
            f"C23: {self.recovery_seconds:g} s after the medium came back, the client stores and loads nothing",
        )

    @contract_test
    async def test_c24_the_room_of_a_dead_client_is_given_back(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        before = await fitting_objects(bounded_rig, client)
        await self._die_holding(bounded_rig, bounded_rig.keys(MAX_OBJECTS))
        fits = 0

        async def is_back() -> bool:
            nonlocal fits
            fits = await fitting_objects(bounded_rig, client)
            return fits >= before

        back = await self._in_time(is_back)
        expect(
            back,
            f"C24: {self.recovery_seconds:g} s after a client died with reservations for {MAX_OBJECTS} objects, "
            f"{fits} objects fit where {before} fitted before",
        )

    @contract_test
    async def test_c24_the_pins_of_a_dead_client_are_given_back(self, bounded_rig: Rig) -> None:
        client = await bounded_rig.client()
        keys = [*await fill(bounded_rig, client), bounded_rig.key()]
        if not await store_one(client, keys[-1]):
            return  # the medium does not evict, so pins change nothing
        there = await client.present(keys)
        await self._die_holding(bounded_rig, there)

        async def evicts() -> bool:
            return await store_one(client, bounded_rig.key())

        expect(
            await self._in_time(evicts),
            f"C24: {self.recovery_seconds:g} s after a client died that had pinned {len(there)} objects, "
            "the medium evicts none of them",
        )

    def _can_take_away(self) -> bool:
        theirs, base = type(self), FailuresContract
        return theirs.take_away is not base.take_away and theirs.bring_back is not base.bring_back

    @asynccontextmanager
    async def _gone(self, rig: Rig) -> AsyncIterator[None]:
        """Take the medium away for the block."""
        if not self._can_take_away():
            pytest.skip(_NO_MEDIUM)
        await rig.settle()
        await asyncio.to_thread(self.take_away, rig.options)
        try:
            yield
            await rig.settle()
        finally:
            await asyncio.to_thread(self.bring_back, rig.options)

    async def _die_holding(
        self, rig: Rig, keys: Sequence[ObjectKey], nbytes: Sequence[int] = (), errand: Errand | None = None
    ) -> None:
        if type(self).die_holding is FailuresContract.die_holding:
            pytest.skip(_NO_DEATH)
        token = current_errand.set(errand)
        try:
            await asyncio.to_thread(self.die_holding, rig.options, keys, nbytes or [OBJECT_BYTES] * len(keys))
        finally:
            current_errand.reset(token)

    async def _in_time(self, condition: Callable[[], Any]) -> bool:
        deadline = time.monotonic() + self.recovery_seconds
        while not await condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return True


async def _prepared(client: Client, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
    async with client.loading(keys) as reservation:
        return reservation.present


async def _calls(rig: Rig, client: Client) -> dict[str, Callable[[], Any]]:
    """Return one call of each method, on an object that is stored and one that is not."""
    key, new = rig.keys(2)
    await client.put({key: content(SIZE)})
    calls: dict[str, Callable[[], Any]] = {
        "contains": lambda: client.contains(rig.keys(1)),
        "prepare_load": lambda: _prepared(client, [key]),
        "load_into": lambda: client.load_into([key], [memoryview(bytearray(SIZE))]),
        "store": lambda: client.store({new: content(SIZE)}),
    }
    if client.backend.capabilities.lists:
        calls["list_objects"] = client.listed
    if client.backend.capabilities.spares:
        calls["touch"] = lambda: client.touch([key], [False])
    calls["delete"] = lambda: client.delete([key])
    return calls


async def _expect_os_error(name: str, call: Callable[[], Any]) -> None:
    try:
        await call()
    except OSError:
        pass
    except Exception as error:
        raise AssertionError(
            f"C23: the medium failed, and {name} raised {type(error).__name__}: {error}; raise an OSError, "
            "such as offload_core.api.BackendError"
        ) from error


async def _granted(rig: Rig, client: Client) -> int:
    """Return the number of objects that one reservation is granted; it is released unused."""
    async with client.storing(rig.keys(MAX_OBJECTS), [OBJECT_BYTES] * MAX_OBJECTS) as reservation:
        return reservation.outcomes.count(None)


async def _failing(client: Client, number: int, preparation: Coroutine[Any, Any, Any]) -> None:
    """Let one thread call of a preparation fail. Release the reservation if there is one all the same."""
    client.calls.script(fail={number})
    try:
        reservation = await preparation
    except OSError:
        return
    finally:
        client.calls.open()
    await reservation.release()
