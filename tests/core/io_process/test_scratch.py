"""The scratch memory of a call is enough for all of its objects, whichever part of the call comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_core.io_process.serving.scratch import CallScratch

PIECES = st.lists(st.integers(1, 100), min_size=1, max_size=12)


@given(PIECES, st.data())
def test_every_object_gets_memory_in_any_order(sizes: list[int], data: st.DataObject) -> None:
    scratch = CallScratch([memoryview(bytearray(size)) for size in sizes])
    wanted = [data.draw(st.integers(1, size)) for size in data.draw(st.permutations(sizes))]
    pieces = [scratch.try_scratch_for_store(nbytes) for nbytes in wanted]
    assert [piece and piece.nbytes for piece in pieces] == wanted
    assert scratch.try_scratch_for_store(1) is None


@given(PIECES)
def test_no_two_objects_get_the_same_memory(sizes: list[int]) -> None:
    buffers = [bytearray(size) for size in sizes]
    scratch = CallScratch([memoryview(buffer) for buffer in buffers])
    for number, size in enumerate(sizes, start=1):
        piece = scratch.try_scratch_for_store(size)
        assert piece is not None
        piece.view[:] = bytes([number]) * size
    assert sorted((set(buffer).pop(), len(set(buffer))) for buffer in buffers) == [
        (number, 1) for number in range(1, len(sizes) + 1)
    ]
