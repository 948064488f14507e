"""Copies between staging memory and places of several parts, against plain slices of bytes."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.elsewhere.host_copier import HostCopier
from offload_core.memory.block_copier import COPY_BYTES, BlockSlice
from offload_core.memory.payload_layout import PackLayout


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6))
def test_a_place_of_several_parts_is_copied_both_ways(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    memory = [bytearray(part) for part in parts]
    copier = HostCopier({3: [memoryview(part) for part in memory]}.__getitem__)
    layout, block = PackLayout("pack", (), len(whole)), [BlockSlice(0, (3,))]
    payload = torch.zeros(len(whole), dtype=torch.int8)
    assert copier.gather(layout, block, payload)
    assert bytes(payload.view(torch.uint8).numpy()) == whole
    payload.copy_(payload.flip(0).clone())
    copier.scatter(layout, block, payload)
    assert b"".join(memory) == whole[::-1]


def test_a_large_place_is_copied_part_by_part() -> None:
    sizes = [COPY_BYTES + 5, 7, COPY_BYTES // 2]
    memory = [bytearray(os.urandom(size)) for size in sizes]
    whole = b"".join(memory)
    copier = HostCopier(lambda place: [memoryview(part) for part in memory])
    layout, block = PackLayout("pack", (), len(whole)), [BlockSlice(0, (3,))]
    payload = torch.zeros(len(whole), dtype=torch.int8)
    told: list[int] = []

    def is_there(nbytes: int) -> None:
        told.append(nbytes)
        assert bytes(payload.view(torch.uint8).numpy()[: sum(told)]) == whole[: sum(told)]

    assert copier.gather_in_parts(layout, block, payload, is_there)
    parts = [COPY_BYTES, 5 + 7 + COPY_BYTES // 2]
    assert told == parts
    payload.copy_(payload.flip(0).clone())
    told.clear()
    copier.scatter_in_parts(layout, block, payload, told.append)
    assert b"".join(memory) == whole[::-1]
    assert told == parts


@pytest.mark.parametrize("nbytes", [1, 7, 9])
def test_a_place_of_another_size_is_refused(nbytes: int) -> None:
    memory = [bytearray(5), bytearray(3)]
    copier = HostCopier(lambda place: [memoryview(part) for part in memory])
    payload = torch.ones(nbytes, dtype=torch.int8)
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(ValueError, match=f"place 3 has 8 bytes, and its object {nbytes}"):
            copy(PackLayout("pack", (), nbytes), [BlockSlice(0, (3,))], payload)
    assert not any(b"".join(memory))
