"""The strategies produce the cases that they exist for."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import Phase, find, given, settings

from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from offload_core.testing.strategies import Content

QUICK = settings(database=None, derandomize=True, phases=[Phase.generate], max_examples=1000)


@given(strategies.keys())
def test_keys_are_as_the_core_makes_them(key: ObjectKey) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", key.namespace)
    assert re.fullmatch(r"[a-z0-9-]{1,64}", key.pack)
    assert 1 <= len(key.chunk_hash) <= 64


SIMILAR: dict[str, Callable[[ObjectKey, ObjectKey], bool]] = {
    "the same hash in another pack": lambda a, b: a.chunk_hash == b.chunk_hash and a.pack != b.pack,
    "the same in another namespace": lambda a, b: a[1:] == b[1:] and a != b,
    "a hash that begins like another": lambda a, b: (
        b.chunk_hash.startswith(a.chunk_hash) and a.chunk_hash != b.chunk_hash
    ),
    "two of the longest": lambda a, b: len(a.chunk_hash) == len(b.chunk_hash) == 64 and a.chunk_hash != b.chunk_hash,
}


@pytest.mark.parametrize("similar", SIMILAR.values(), ids=SIMILAR)
def test_keys_are_easily_taken_for_one_another(similar: Callable[[ObjectKey, ObjectKey], bool]) -> None:
    batches = strategies.batches(strategies.keys())
    find(batches, lambda keys: any(similar(a, b) for a in keys for b in keys), settings=QUICK)


@pytest.mark.parametrize("size", [0, 1, 17, 4095, 4096, 4097])
def test_payloads_and_buffers_have_the_sizes_that_matter(size: int) -> None:
    find(strategies.payloads(), lambda payload: len(payload) == size, settings=QUICK)
    find(strategies.buffers(), lambda buffer: len(buffer) == size and not buffer.readonly, settings=QUICK)


def test_batches_are_empty_and_repeat() -> None:
    batches = strategies.batches(strategies.keys())
    find(batches, lambda batch: not batch, settings=QUICK)
    find(batches, lambda batch: len(set(batch)) < len(batch), settings=QUICK)


def test_contents_of_one_size_differ_almost_everywhere() -> None:
    one, two = Content(4096, 0).data(), Content(4096, 1).data()
    assert one == Content(4096, 0).data()
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 100
