"""An object that is sealed while a backend stores it: it has the bytes of one that was sealed before."""

from __future__ import annotations

import os
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import CHECK_BYTES
from offload_core.objects import format as object_format
from offload_core.objects.departing_object import DepartingObject
from offload_core.objects.format import HEADER_BYTES

KEY = ObjectKey("ab" * 32, "full-u256", bytes(32))
SIZES = (0, 1, 10_000, 2 * CHECK_BYTES - HEADER_BYTES - 1, 2 * CHECK_BYTES - HEADER_BYTES, 3 * CHECK_BYTES + 5)


def unsealed(payload_bytes: int) -> tuple[memoryview, bytes]:
    """Return an object with a dirty header, and its bytes as they are after a seal."""
    whole = memoryview(bytearray(os.urandom(HEADER_BYTES + payload_bytes)))
    right = bytearray(whole)
    object_format.seal(memoryview(right), KEY)
    return whole, bytes(right)


@given(st.lists(st.integers(-2, 4000), max_size=8))
def test_a_seal_is_right_whatever_it_was_told_before(told: list[int]) -> None:
    whole, right = unsealed(5000)
    seal = DepartingObject(whole, KEY)
    for nbytes in told:
        seal.stored(nbytes)
    seal.seal()
    assert bytes(whole) == right


@pytest.mark.parametrize("payload_bytes", SIZES)
def test_the_parts_are_the_sealed_object_also_if_a_store_begins_again(payload_bytes: int) -> None:
    whole, right = unsealed(payload_bytes)
    seal = DepartingObject(whole, KEY)
    for taken in (1, 2, None):  # the first two stores break off
        stored = bytearray(len(whole))
        for offset, part in islice(seal.parts(whole.toreadonly()), taken):
            stored[offset : offset + len(part)] = part
    assert bytes(stored) == right


def test_the_beginning_of_a_large_object_comes_last() -> None:
    whole, _ = unsealed(3 * CHECK_BYTES)
    places = [(offset, len(part)) for offset, part in DepartingObject(whole, KEY).parts(whole)]
    assert places[-1] == (0, HEADER_BYTES)
    assert [offset for offset, _ in places[:-1]] == [HEADER_BYTES, *(at * CHECK_BYTES for at in (1, 2, 3))]


def test_each_part_is_read_before_it_is_stored() -> None:
    """So the writer finds its bytes in the processor's cache, and its pages mapped."""
    whole, right = unsealed(3 * CHECK_BYTES)
    seal = DepartingObject(whole, KEY)
    for offset, part in seal.parts(whole):
        if offset:
            whole[offset : offset + len(part)] = bytes(len(part))  # a read after this would see another content
    seal.seal()
    assert bytes(whole[:HEADER_BYTES]) == right[:HEADER_BYTES]


@pytest.mark.parametrize("late", [lambda seal: seal.seal(), lambda seal: seal.stored(100)])
def test_a_seal_that_is_called_after_its_end_touches_nothing(late: object) -> None:
    whole, _ = unsealed(5000)
    seal = DepartingObject(whole, KEY)
    seal.end()
    whole[:] = bytes(len(whole))  # another owner
    late(seal)  # type: ignore[operator]
    assert bytes(whole) == bytes(len(whole))
