"""Common parts of the contract's tests: their runner and their failure messages."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from offload_core.testing.rig.clients import Rig, content

Test = Callable[..., None]


def contract_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Test:
    """Turn a coroutine function into a plain test; it runs on the :class:`Rig` that is its only fixture.

    An unexpected exception of the backend becomes a failure that names the clause.
    """
    clause = clause_of(test.__name__)

    @functools.wraps(test)
    def run(self: object, *fixture: Rig, **named_fixture: Rig) -> None:
        (rig,) = (*fixture, *named_fixture.values())
        try:
            rig.run(test(self, rig))
        except AssertionError as error:
            if re.match(r"C\d+: ", str(error)):
                raise
            raise AssertionError(f"{clause}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{clause}: the backend raised {type(error).__name__}: {error}") from error

    return run


def clause_of(test_name: str) -> str:
    """Return the clause in a test's name: ``C7`` for ``test_c07_…``."""
    match = re.match(r"test_c(\d\d)_", test_name)
    if match is None:
        raise ValueError(f"{test_name!r} does not name a clause; write test_cNN_…")
    return f"C{int(match[1])}"


async def makes_thread_calls(rig: Rig) -> bool:
    """Return whether a store or a load makes a thread call, which a test can hold and make fail."""
    client = await rig.client()
    key = rig.key()
    client.calls.script()
    await client.put({key: content(10)})
    await client.get(key, 10)
    count = client.calls.count
    await client.delete([key])
    await client.close()
    return count > 0


async def need_thread_calls(rig: Rig) -> None:
    """Skip the running test if the backend makes no thread calls."""
    if not await makes_thread_calls(rig):
        pytest.skip(
            "stores and loads make no thread calls that this test could fail; "
            "test the clause yourself, with a server that fails"
        )


@contextmanager
def threads_that_alternate() -> Iterator[None]:
    """Let threads take turns far more often than usual, so that races happen soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def expect(condition: object, message: str) -> None:
    """Fail with ``message`` unless ``condition`` holds; the message starts with the clause."""
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(message)


def expect_results(clause: str, call: str, got: Sequence[object], wanted: Sequence[object]) -> None:
    """Fail unless a call returned the wanted results, key by key."""
    __tracebackhide__ = True
    expect(
        list(got) == list(wanted),
        f"{clause}: {call} returned {_words(got)}; it should return {_words(wanted)}",
    )


def expect_bytes(clause: str, name: str, got: bytes | bytearray, wanted: bytes) -> None:
    """Fail unless ``got`` is ``wanted``, and name the first byte that differs."""
    __tracebackhide__ = True
    if len(got) != len(wanted):
        raise AssertionError(f"{clause}: {name} has {len(got)} bytes in place of {len(wanted)}")
    if got != wanted:
        index = next(i for i, (one, two) in enumerate(zip(got, wanted, strict=True)) if one != two)
        raise AssertionError(
            f"{clause}: {name}: byte {index} of {len(wanted)} is 0x{got[index]:02x} in place of 0x{wanted[index]:02x}"
        )


def _words(results: Sequence[object]) -> str:
    names = (getattr(result, "name", None) or repr(result) for result in results)
    return f"[{', '.join(names)}]"
