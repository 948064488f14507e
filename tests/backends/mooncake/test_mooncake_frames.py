"""The bytes of stored objects, and Mooncake's answers: right or refused, whatever comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_mooncake.client import Client
from offload_backend_mooncake.frame import HEAD_BYTES, Frames, payload_bytes
from offload_backend_mooncake.objects import BYTES_AT_ONCE, OBJECTS_AT_ONCE, Objects, rounds

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.support.completing_seal import CompletingSeal

MIB = 1024**2

CODES = st.sampled_from([0, 1, 40, 41, 45, 2**40, -1, -200, -600, -702, -703, -704, -705, -706, -707, -714, -800, -801])


def stored_bytes(name: str, payload: bytes) -> bytes:
    frames = Frames([name], [memoryview(payload)])
    frames.seal()
    head: bytes = frames._heads[0].tobytes()
    return head + payload


def is_whole(name: str, stored: bytes, nbytes: int, right: bytes | None = None) -> bool:
    """Scatter a stored object of the right size, as Mooncake does, and check it.

    Args:
        right: the payload that the core's check finds right, if any.
    """
    assert len(stored) == HEAD_BYTES + nbytes
    buffer = memoryview(bytearray(stored[HEAD_BYTES:]))
    frames = Frames([name], [buffer])
    frames._heads[0] = np.frombuffer(stored[:HEAD_BYTES], np.uint8)
    return frames.is_whole(0, None if right is None else RecordingCheck(buffer, right))


@given(st.text(max_size=20), st.binary(max_size=200))
def test_what_was_sealed_is_whole(name: str, payload: bytes) -> None:
    stored = stored_bytes(name, payload)
    assert payload_bytes(len(stored)) == len(payload)
    assert is_whole(name, stored, len(payload))
    assert not is_whole(f"{name}x", stored, len(payload))


@given(st.binary(max_size=100), st.data())
def test_a_changed_byte_anywhere_is_seen(payload: bytes, data: st.DataObject) -> None:
    stored = bytearray(stored_bytes("a/b", payload))
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    assert not is_whole("a/b", bytes(stored), len(payload))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_check_that_finds_the_payload_right_stands_for_its_checksum_alone(
    payload: bytes, data: st.DataObject
) -> None:
    stored = bytearray(stored_bytes("a/b", payload))
    assert is_whole("a/b", bytes(stored), len(payload), right=payload[:-1]), "the checksum is right"
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    is_in_checksum_or_payload = place >= HEAD_BYTES - 8
    assert is_whole("a/b", bytes(stored), len(payload), right=bytes(stored[HEAD_BYTES:])) is is_in_checksum_or_payload


@pytest.mark.parametrize("place", [0, 4095, 4096, MIB, MIB + 4096, 2 * MIB + 99])
def test_a_changed_byte_of_a_large_payload_is_seen(place: int) -> None:
    payload = bytes(2 * MIB + 100)
    stored = bytearray(stored_bytes("a/b", payload))
    assert is_whole("a/b", bytes(stored), len(payload))
    stored[HEAD_BYTES + place] ^= 1
    assert not is_whole("a/b", bytes(stored), len(payload))


@pytest.mark.parametrize("head_bytes", [0, 100, 4096, 5000])
@pytest.mark.parametrize("nbytes", [0, 100, 4096, 4097, 2 * MIB + 4096])
def test_a_head_is_that_of_the_payload_after_its_seal(head_bytes: int, nbytes: int) -> None:
    seal = CompletingSeal(nbytes, head_bytes)
    frames = Frames(["a"], [seal.buffer.toreadonly()])
    frames.seal([seal])
    assert seal.buffer == seal.complete
    assert frames._heads[0].tobytes() + seal.complete == stored_bytes("a", seal.complete)
    if nbytes > head_bytes == 4096:
        assert sum(seal.told) == nbytes - head_bytes
        assert max(seal.told) <= MIB, "it reads parts that have left the processor's cache"


@given(st.binary(min_size=HEAD_BYTES, max_size=200))
def test_foreign_bytes_are_not_whole(stored: bytes) -> None:
    assert not is_whole("a/b", stored, len(stored) - HEAD_BYTES)


def test_addresses_are_those_of_the_buffers() -> None:
    memory = np.arange(100, dtype=np.uint8)
    read_only = memoryview(memory.data).toreadonly()
    frames = Frames(["a", "b", "c"], [read_only[3:50], memoryview(b""), memoryview(memory.data)[50:]])
    (_, first), (_,), (_, last) = frames.addresses
    assert (first, last) == (memory.ctypes.data + 3, memory.ctypes.data + 50)
    assert frames.sizes == [[HEAD_BYTES, 47], [HEAD_BYTES], [HEAD_BYTES, 50]]
    assert [nbytes for _, nbytes in frames.regions] == [3 * HEAD_BYTES, 47, 50]


def test_an_object_without_a_head_has_no_payload() -> None:
    assert payload_bytes(HEAD_BYTES - 1) is None
    assert payload_bytes(HEAD_BYTES) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 80 * 1024**2)), max_size=60))
def test_rounds_have_distinct_names_and_bounded_sizes(objects: list[tuple[str, int]]) -> None:
    names, nbytes = [name for name, _ in objects], [size for _, size in objects]
    batches = list(rounds(names, nbytes))
    assert Counter(index for batch in batches for index in batch) == Counter(range(len(objects)))
    for batch in batches:
        assert len({names[index] for index in batch}) == len(batch) <= OBJECTS_AT_ONCE
        assert len(batch) == 1 or sum(nbytes[index] for index in batch) <= BYTES_AT_ONCE


class _Scripted:
    """A client whose cluster answers as a test says."""

    def __init__(self, codes: Sequence[int], there: Sequence[int], nbytes: int, write: Callable[..., None]) -> None:
        self.cluster = SimpleNamespace(protocol="tcp")
        self.module = SimpleNamespace(ReplicateConfig=SimpleNamespace)
        self._codes, self._there, self._nbytes, self._write = list(codes), list(there), nbytes, write

    def transfer(self, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        return call(self)

    request = transfer

    def batch_get_into_multi_buffers(self, names: Any, addresses: Any, sizes: Any) -> list[int]:
        self._write()
        return self._codes

    def batch_put_from_multi_buffers(self, names: Any, addresses: Any, sizes: Any, policy: Any) -> list[int]:
        return self._codes

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        return self._there[: len(names)]

    def batch_remove(self, names: Sequence[str], force: bool) -> list[int]:
        return self._codes

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Any]]:
        buffer = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=self._nbytes))
        one = SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: buffer)
        return {name: [one] for name in names}


def objects_of(codes: Sequence[int], there: Sequence[int], nbytes: int, write: Any = lambda: None) -> Objects:
    return Objects(cast(Client, _Scripted(codes, there, nbytes, write)), 1, False, 0.0)


ANSWERS = (st.lists(CODES, max_size=4), st.lists(CODES, max_size=4), st.integers(0, 100))


@given(*ANSWERS, st.binary(min_size=5, max_size=5))
def test_no_answer_makes_wrong_bytes_a_hit(codes: list[int], there: list[int], nbytes: int, garbage: bytes) -> None:
    buffers = [bytearray(5) for _ in range(2)]

    def write() -> None:
        for buffer in buffers:
            buffer[:] = garbage

    try:
        outcomes = objects_of(codes, there, nbytes, write).load(["a", "b"], [memoryview(buffer) for buffer in buffers])
    except OSError:
        return
    assert LoadOutcome.HIT not in outcomes
    assert len(outcomes) == 2


@given(*ANSWERS)
def test_no_answer_makes_an_absent_object_stored(codes: list[int], there: list[int], nbytes: int) -> None:
    try:
        outcomes = objects_of(codes, there, nbytes).store(["a", "b"], [memoryview(b"x")] * 2)
    except OSError:
        return
    assert len(outcomes) == 2
    assert outcomes.count(StoreOutcome.STORED) <= there.count(1)


@given(*ANSWERS)
def test_any_answer_to_lookups_and_deletions_is_an_answer_or_an_error(
    codes: list[int], there: list[int], nbytes: int
) -> None:
    for call in ("contains", "sizes", "delete"):
        try:
            found = getattr(objects_of(codes, there, nbytes), call)(["a", "b"])
        except OSError:
            continue
        assert found is None or len(found) == 2


def test_an_unknown_code_is_an_error_that_names_it() -> None:
    with pytest.raises(OSError, match=r"cannot look up objects: Mooncake failed \(code -4242\)"):
        objects_of([], [-4242, 1], 0).contains(["a", "b"])
