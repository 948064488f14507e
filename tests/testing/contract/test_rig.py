"""The rig of the contract's tests: it holds calls, makes calls fail, and ends."""

from __future__ import annotations

import asyncio
import gc
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import BackendType
from offload_core.testing.rig import clients, watched_calls
from offload_core.testing.rig.blocking_calls import blocking_calls
from offload_core.testing.rig.clients import Rig, ended, held_or_done, until
from tests.testing.contract.reference import MEDIA, REFERENCE, ReferenceBackend, ReferenceOptions


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(REFERENCE, {"medium": "rig"}) as rig:
        yield rig
    MEDIA.pop("rig", None)


def test_held_calls_wait_until_they_may_pass(rig: Rig) -> None:
    async def main() -> None:
        client = await rig.client()
        client.calls.script(hold={1, 3})
        made: list[int] = []
        first, second, third = (
            asyncio.ensure_future(client.backend.run_blocking(made.append, number)) for number in (1, 2, 3)
        )
        await second
        await until(lambda: client.calls.waiting == 2)
        assert made == [2]
        client.calls.let_pass(3)
        await third
        assert made == [2, 3]
        client.calls.open()
        await first
        assert (made, client.calls.count, client.calls.unfinished) == ([2, 3, 1], 3, 0)

    rig.run(main())


def test_calls_that_are_to_fail_are_not_made(rig: Rig) -> None:
    async def main() -> None:
        client = await rig.client()
        client.calls.script(fail={2})
        made: list[int] = []
        await client.backend.run_blocking(made.append, 1)
        with pytest.raises(OSError, match="call 2 was made to fail"):
            await client.backend.run_blocking(made.append, 2)
        await client.backend.run_blocking(made.append, 3)
        assert made == [1, 3]

    rig.run(main())


def test_calls_of_asyncio_to_thread_are_held_for_the_client_that_made_them(rig: Rig) -> None:
    class UsesToThread(ReferenceBackend):
        async def delete(self, keys: object) -> None:
            await asyncio.to_thread(threading.current_thread)

    async def main() -> None:
        one, other = await rig.client(), await rig.client()
        one.calls.script(hold=None)
        held = await held_or_done(one, one.delete([]))
        assert not held.done()
        await other.delete([])
        one.calls.open()
        assert await ended(held) is None

    rig.backend_type = BackendType("to-thread", UsesToThread, ReferenceOptions)
    rig.run(main())


def test_what_does_not_end_is_given_up_and_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(ReferenceBackend):
        async def contains(self, keys: object) -> Any:
            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    async def main(rig: Rig) -> None:
        await (await rig.client()).contains(rig.keys(1))

    left: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: left.append(unraisable.exc_value))
    monkeypatch.setattr(clients, "_CANCELLED_SECONDS", 0.05)
    rig = Rig(BackendType("hangs", Hangs, ReferenceOptions), {"medium": "rig"}, test_seconds=0.05)
    message = r"did not end within 0\.05 s \(raise test_seconds for a slow medium\)"
    with rig, pytest.raises(AssertionError, match=message):
        rig.run(main(rig))
    rig._runner.get_loop().close()
    del rig
    gc.collect()
    assert left == []


def test_a_loop_that_waits_for_a_held_call_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_calls, "HOLD_LIMIT_SECONDS", 0.05)

    async def main() -> None:
        client = await rig.client()
        client.calls.script(hold=None)
        client.backend.context.executor.submit(int).result()

    with pytest.raises(AssertionError, match="C8: the event loop stood still"):
        rig.run(main())


def test_calls_that_may_block_are_recorded_on_this_thread_only(tmp_path: Path) -> None:
    def block() -> None:
        time.sleep(0)
        (tmp_path / f"folder-{threading.get_ident()}").mkdir()
        sqlite3.connect(":memory:").close()
        (tmp_path / "file").write_text("")
        (tmp_path / "file").is_file()

    with blocking_calls() as recorded:
        thread = threading.Thread(target=block)
        thread.start()
        thread.join()
    assert [call.partition("(")[0] for call in recorded] == ["Thread.join"]
    with blocking_calls() as recorded:
        block()
    assert [call.partition("(")[0] for call in recorded] == [
        *("time.sleep", "os.mkdir", "sqlite3.connect", "open", "os.stat"),
    ]
    assert f"{__file__}:" in recorded[0]


def test_what_asyncio_calls_by_itself_is_not_recorded() -> None:
    async def main() -> list[str]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        with blocking_calls() as recorded:
            _, writer = await asyncio.open_connection(*address)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        return recorded

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "C2: contains returned None; clause C2 requires a bool per key, in a list"),
        ({"a key": False}, "C2: contains returned {'a key': False}; clause C2 requires a bool per key, in a list"),
    ],
)
def test_an_answer_that_is_no_sequence_is_named(rig: Rig, answer: object, message: str) -> None:
    class AnswersOddly(ReferenceBackend):
        async def contains(self, keys: object) -> Any:
            return answer

    async def main() -> None:
        await (await rig.client()).contains(rig.keys(1))

    rig.backend_type = BackendType("odd", AnswersOddly, ReferenceOptions)
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        rig.run(main())


def test_an_outcome_of_another_type_is_named(rig: Rig) -> None:
    class LoadsTrue(ReferenceBackend):
        async def load_into(self, keys: Any, buffers: object) -> Any:
            return [True] * len(keys)

    async def main() -> None:
        await (await rig.client()).load(rig.keys(1), [memoryview(bytearray(1))])

    rig.backend_type = BackendType("odd", LoadsTrue, ReferenceOptions)
    with pytest.raises(
        AssertionError,
        match=r"^C2: load_into returned True; clause C2 requires a LoadOutcome per key: HIT, MISS, CORRUPT$",
    ):
        rig.run(main())
