"""Clauses about buffers: C7, the end of a call's access to its buffers, and C13, calls that run during ``close``.

C7 for loads in one call is a part of C22, and for stores that seal a part of C26.

Each test stops a call of the backend at the gate, on its thread, before it has begun. If the coroutine ends meanwhile,
it has left its thread behind. The test then opens the gate and watches the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.checks import contract_test, expect, need_thread_calls
from offload_core.testing.rig.clients import Client, Rig, content, ended, held_or_done, turns, until
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal

SIZE = 5000
POISON = 0xEE
SEALING = "store that seals"
MAX_HELD_CALLS = 4
"""Most thread calls of one operation that are held, one by one."""
MAX_TURNS = 8
"""Operations are also cancelled after fewer turns of the event loop than this, for backends without threads."""
MAX_TURNS_OF_OTHERS = 2
"""The same for calls without buffers."""
LEFT_SECONDS = 1.0
"""Time for the tasks of a client library, which may end a little after it is closed."""

Operation = Callable[[Client, list[ObjectKey], list[memoryview]], Coroutine[Any, Any, Any]]


class BuffersContract:
    """No access to a buffer after its call has ended."""

    @contract_test
    async def test_c07_a_load_that_returned_does_not_touch_its_buffer_afterwards(self, rig: Rig) -> None:
        async for call in _ended_calls(rig, "load", _returned):
            await call.expect_buffers_left_alone()

    @contract_test
    async def test_c07_a_load_that_failed_does_not_touch_its_buffer_afterwards(self, rig: Rig) -> None:
        await need_thread_calls(rig)
        async for call in _ended_calls(rig, "load", _failed):
            await call.expect_buffers_left_alone()

    @contract_test
    async def test_c07_a_cancelled_load_does_not_touch_its_buffer_afterwards(self, rig: Rig) -> None:
        for cancel in (_cancelled, _cancelled_twice, _cancelled_with_one_ending):
            async for call in _ended_calls(rig, "load", cancel):
                await call.expect_buffers_left_alone()
        async for call in _cancelled_after_turns(rig, "load"):
            await call.expect_buffers_left_alone()

    @contract_test
    async def test_c22_a_load_in_one_call_does_not_touch_its_buffer_afterwards(self, one_call_rig: Rig) -> None:
        for end in (_returned, _failed, _cancelled, _cancelled_twice, _cancelled_with_one_ending):
            async for call in _ended_calls(one_call_rig, "load in one call", end):
                await call.expect_buffers_left_alone("C22")
        async for call in _cancelled_after_turns(one_call_rig, "load in one call"):
            await call.expect_buffers_left_alone("C22")

    @contract_test
    async def test_c07_a_store_that_returned_does_not_read_its_buffer_afterwards(self, rig: Rig) -> None:
        async for call in _ended_calls(rig, "store", _returned):
            await call.expect_new_bytes_not_stored()

    @contract_test
    async def test_c07_a_store_that_failed_does_not_read_its_buffer_afterwards(self, rig: Rig) -> None:
        await need_thread_calls(rig)
        async for call in _ended_calls(rig, "store", _failed):
            await call.expect_new_bytes_not_stored()

    @contract_test
    async def test_c07_a_cancelled_store_does_not_read_its_buffer_afterwards(self, rig: Rig) -> None:
        for cancel in (_cancelled, _cancelled_twice, _cancelled_with_one_ending):
            async for call in _ended_calls(rig, "store", cancel):
                await call.expect_new_bytes_not_stored()
        async for call in _cancelled_after_turns(rig, "store"):
            await call.expect_new_bytes_not_stored()

    @contract_test
    async def test_c26_a_store_that_seals_does_not_touch_its_buffer_afterwards(self, sealing_rig: Rig) -> None:
        for end in (_returned, _failed, _cancelled, _cancelled_twice, _cancelled_with_one_ending):
            async for call in _ended_calls(sealing_rig, SEALING, end):
                await call.expect_buffers_left_alone("C26")
                await call.expect_new_bytes_not_stored("C26")
        async for call in _cancelled_after_turns(sealing_rig, SEALING):
            await call.expect_buffers_left_alone("C26")
            await call.expect_new_bytes_not_stored("C26")

    @contract_test
    async def test_c13_close_waits_for_a_running_load(self, rig: Rig) -> None:
        await _expect_close_to_wait(rig, "load")

    @contract_test
    async def test_c13_close_waits_for_a_running_store(self, rig: Rig) -> None:
        await _expect_close_to_wait(rig, "store")

    @contract_test
    async def test_c13_close_lets_running_operations_end_as_usual(self, rig: Rig) -> None:
        usual: dict[str, set[Any]] = {
            "load": {LoadOutcome.HIT},
            "store": {StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT},
        }
        for kind, outcomes in usual.items():
            async for closing in _closings(rig, kind):
                error = closing.result if isinstance(closing.result, BaseException) else None
                expect(
                    error is None,
                    f"C13: close cut off {closing.running}: it raised {type(error).__name__}: {error}",
                )
                expect(
                    isinstance(closing.result, list) and outcomes.issuperset(closing.result),
                    f"C13: close cut off {closing.running}: it answered {closing.result}",
                )

    @contract_test
    async def test_c13_close_waits_for_lookups_deletes_and_listings(self, rig: Rig) -> None:
        declared = rig.construct().backend.capabilities
        usual: dict[str, tuple[object, ...]] = {"lookup": (True, False) if declared.evicts else (True,), "delete": ()}
        for kind in ("lookup", "delete", *(["listing"] if declared.lists else [])):
            async for closing in _closings(rig, kind, MAX_TURNS_OF_OTHERS):
                expect(not closing.early, f"C13: close returned before {closing.running} had ended")
                if closing.failure is not None:
                    raise closing.failure
                if kind in usual:
                    answers = closing.result if isinstance(closing.result, list) else [closing.result]
                    good = closing.result is None or all(one in usual[kind] for one in answers)
                    expect(good, f"C13: close cut off {closing.running}: it ended with {closing.result!r}")

    @contract_test
    async def test_c13_closing_again_is_harmless(self, rig: Rig) -> None:
        before = asyncio.all_tasks()
        client = await rig.client()
        await client.put({rig.key(): content(10)})
        await client.close()
        left = asyncio.all_tasks() - before
        if left:
            _, left = await asyncio.wait(left, timeout=LEFT_SECONDS)
        names = ", ".join(repr(task.get_coro()) for task in left)
        expect(not left, f"C13: close returned, and {LEFT_SECONDS:g} s later tasks of the client still run: {names}")
        await client.close()

    @contract_test
    async def test_c13_closing_what_was_never_opened_is_harmless(self, rig: Rig) -> None:
        client = rig.construct()
        await client.close()


class _Call:
    """One load, store or other call with three keys; ``how`` says in messages how it ended."""

    def __init__(self, rig: Rig, client: Client, kind: str) -> None:
        self.rig, self.client, self.kind, self.how = rig, client, kind, ""
        self.keys = rig.keys(3)
        self.contents = [content(SIZE, seed) for seed in range(3)]
        self.stores = kind in ("store", SEALING)
        self.buffers = [bytearray(wanted) if self.stores else bytearray(SIZE) for wanted in self.contents]

    async def prepare(self) -> Any:
        """Store the objects that a load needs, and return the reservation to hold."""
        if self.stores:
            return self.client.storing(self.keys, [SIZE] * 3)
        await self.client.put(dict(zip(self.keys, self.contents, strict=True)))
        return self.client.loading(self.keys) if self.kind == "load" else nullcontext()

    def start(self) -> Coroutine[Any, Any, Any]:
        """Return the coroutine of the call."""
        if self.kind == "listing":
            return self.client.listed()
        if self.kind in ("lookup", "delete"):
            return (self.client.contains if self.kind == "lookup" else self.client.delete)(self.keys)
        views = [memoryview(buffer) for buffer in self.buffers]
        if self.kind == "load in one call":
            return self.client.load_and_check(self.keys, views, [RecordingCheck(view) for view in views])
        if self.kind == SEALING:
            return self.client.store_and_seal(self.keys, views, [RecordingSeal(view) for view in views])
        run: Operation = Client.load_into if self.kind == "load" else Client.store_from
        return run(self.client, self.keys, views)

    def reuse_buffers(self) -> None:
        """Fill the buffers as their next owner would."""
        for buffer in self.buffers:
            buffer[:] = bytes([POISON]) * SIZE

    async def expect_buffers_left_alone(self, clause: str = "C7") -> None:
        for number, buffer in enumerate(self.buffers):
            changed = next((index for index, byte in enumerate(buffer) if byte != POISON), None)
            expect(
                changed is None,
                f"{clause}: {self.how}, the {'store' if self.stores else 'load'} wrote to buffer {number} of 3 after "
                f"it had ended: byte {changed} went from 0x{POISON:02x} to 0x{buffer[changed or 0]:02x}",
            )

    async def expect_new_bytes_not_stored(self, clause: str = "C7") -> None:
        for number, (key, wanted) in enumerate(zip(self.keys, self.contents, strict=True)):
            outcome, got = await self.client.get(key, SIZE)
            others = [one for one, two in zip(got, wanted, strict=True) if one != two]
            late, count = outcome is LoadOutcome.HIT and set(others) == {POISON}, len(others)
            expect(
                not late,
                f"{clause}: {self.how}, the store read buffer {number} of 3 after it had ended: "
                f"{count} of {SIZE} stored bytes are those of the buffer's next owner (0x{POISON:02x})",
            )


async def _ended_calls(
    rig: Rig, kind: str, end: Callable[[_Call, int], Awaitable[asyncio.Task[Any] | None]]
) -> AsyncIterator[_Call]:
    """Hold each thread call of an operation in turn, let ``end`` end the operation, and yield it with idle threads."""
    client = await rig.client()
    for number in range(1, MAX_HELD_CALLS + 1):
        call = _Call(rig, client, kind)
        async with await call.prepare():
            task = await end(call, number)
            reached = client.calls.count >= number
            if task is not None:
                call.reuse_buffers()
            client.calls.open()
            await rig.settle()
        if task is not None:
            yield call
        if not reached:
            break
    await client.close()


async def _held(call: _Call, *, hold: set[int] | None, fail: Collection[int] = ()) -> asyncio.Task[Any]:
    await call.rig.settle()
    call.client.calls.script(hold=hold, fail=fail)
    return await held_or_done(call.client, call.start())


async def _to_its_end(call: _Call, task: asyncio.Task[Any]) -> BaseException | None:
    """Open the gate, unless the call has ended already and left a thread at the closed gate."""
    if not task.done():
        call.client.calls.open()
    return await ended(task)


async def _returned(call: _Call, number: int) -> asyncio.Task[Any] | None:
    call.how = "after it returned"
    task = await _held(call, hold={number})
    return task if await _to_its_end(call, task) is None else None


async def _failed(call: _Call, number: int) -> asyncio.Task[Any] | None:
    call.how = f"after its thread call {number + 1} failed while call {number} ran"
    task = await _held(call, hold={number}, fail={number + 1})
    return task if await _to_its_end(call, task) is not None else None


async def _cancelled(call: _Call, number: int, times: int = 1) -> asyncio.Task[Any] | None:
    call.how = f"cancelled {times} times while its thread call {number} ran"
    task = await _held(call, hold={number})
    if task.done():
        await ended(task)
        return None
    for _ in range(times):
        task.cancel()
        await turns()
    await _to_its_end(call, task)
    return task


async def _cancelled_twice(call: _Call, number: int) -> asyncio.Task[Any] | None:
    return await _cancelled(call, number, times=2)


async def _cancelled_with_one_ending(call: _Call, number: int) -> asyncio.Task[Any] | None:
    call.how = f"cancelled while all its thread calls ran, of which number {number} ended first"
    task = await _held(call, hold=None)
    if task.done():
        await ended(task)
        return None
    running = call.client.calls.unfinished
    task.cancel()
    call.client.calls.let_pass(number)
    await until(lambda: task.done() or call.client.calls.unfinished < running or number > running)
    await turns()
    await _to_its_end(call, task)
    return task


async def _cancelled_after_turns(rig: Rig, kind: str) -> AsyncIterator[_Call]:
    client = await rig.client()
    for count in range(MAX_TURNS):
        call = _Call(rig, client, kind)
        call.how = f"cancelled after {count} turns of the event loop"
        async with await call.prepare():
            task = asyncio.ensure_future(call.start())
            await turns(count)
            cancelled = task.cancel()
            await ended(task)
            if cancelled:
                call.reuse_buffers()
            await rig.settle()
        if cancelled:
            yield call
    await client.close()


@dataclass
class _Closing:
    """A call during which its client was closed.

    Args:
        running: the operation, in words.
        early: whether ``close`` returned before the operation had ended.
        result: the outcomes of the operation, or its error.
        failure: the error of ``close``.
    """

    running: str
    early: bool
    result: object
    failure: BaseException | None


async def _closings(rig: Rig, kind: str, max_turns: int = MAX_TURNS) -> AsyncIterator[_Closing]:
    """Close a client while an operation is held in a thread, and some turns of the loop after an operation began.

    A listing runs only while it gets a batch. So its client is closed during a thread call, and its end is not checked.
    """
    for count in range(1 if kind == "listing" else max_turns):
        client = await rig.client()
        call = _Call(rig, client, kind)
        async with await call.prepare():
            if count == 0:
                client.calls.script(hold={1})
                task = await held_or_done(client, call.start())
                running = f"a {kind} held in a thread"
            else:
                client.calls.script()
                task = asyncio.ensure_future(call.start())
                await turns(count)
                running = f"a {kind} begun {count} turns of the event loop before"
            closing = asyncio.ensure_future(client.close())
            await turns()
            closed = closing.done()
            await turns()  # the operation that close waited for may need some more turns to return
            runs = client.calls.waiting > 0 or client.calls.unfinished > 0
            early = closed and (runs or (kind != "listing" and not task.done()))
            client.calls.open()
            error = await ended(task)
            failure = await ended(closing)
        yield _Closing(running, early, task.result() if error is None else error, failure)


async def _expect_close_to_wait(rig: Rig, kind: str) -> None:
    async for closing in _closings(rig, kind):
        expect(not closing.early, f"C13: close returned before {closing.running} had ended")
        if closing.failure is not None:
            raise closing.failure
