"""Names of objects: made in bulk and from a view of the engine's hashes, they are the same names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.planning.chunk_keys import ChunkHashes, object_keys
from offload_core.testing import strategies

block_hashes = st.integers(0, 40).map(lambda count: [number.to_bytes(8, "big") for number in range(count)])


def test_keys_made_in_bulk_are_keys_like_any_other() -> None:
    keys = list(object_keys("ab" * 32, "full-u16", [b"\1", b"\2"]))
    assert keys == [ObjectKey("ab" * 32, "full-u16", b"\1"), ObjectKey("ab" * 32, "full-u16", b"\2")]
    assert [type(key) for key in keys] == [ObjectKey, ObjectKey]
    assert keys[1].path == "ab" * 32 + "/full-u16/02"


@given(block_hashes, st.integers(1, 5), st.slices(20).filter(lambda part: part.step is None or part.step > 0))
def test_a_chunk_is_named_by_the_hash_at_its_end(hashes: list[bytes], factor: int, part: slice) -> None:
    names = hashes[factor - 1 :: factor]
    view = ChunkHashes(hashes, factor)
    assert list(view) == names
    assert list(view[part]) == names[part]


def test_hashes_that_come_later_name_more_chunks() -> None:
    hashes = [b"0", b"1", b"2"]
    view = ChunkHashes(hashes, 2)
    hashes.append(b"3")
    assert (len(view), view[1]) == (2, b"3")


@given(strategies.keys())
def test_a_path_names_its_key(key: ObjectKey) -> None:
    assert ObjectKey.from_path(key.path) == key


@pytest.mark.parametrize(
    "path",
    [
        *("", "full-u16/00", "ab" * 32 + "/full-u16/", "ab" * 32 + "/full-u16/0", "ab" * 32 + "/full-u16/00.tmp"),
        *("/" + "ab" * 32 + "/full-u16/00", "AB" * 32 + "/full-u16/00", "ab" * 32 + "/Full/00", "ab" * 32 + "//00"),
        "ab" * 32 + "/full-u16/" + "00" * 65,
        "ab" * 32 + "/full-u16/00\n",
    ],
)
def test_a_path_of_no_key_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is no path of an object; one is namespace/pack/hash"):
        ObjectKey.from_path(path)
