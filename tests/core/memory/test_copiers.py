"""The size of the buffer on a device if none is configured."""

from __future__ import annotations

import pytest

from offload_core.memory.copiers import default_buffer_bytes

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("largest", "free", "total", "expected"),
    [
        (2 * MIB, 8 * GIB, 80 * GIB, 320 * MIB),
        (2 * MIB, 2 * GIB, 24 * GIB, 96 * MIB),
        (2 * MIB, 2 * GIB, 80 * GIB, 128 * MIB),
        (2 * MIB, 100 * MIB, 80 * GIB, 64 * MIB),
        (100 * MIB, 8 * GIB, 80 * GIB, 400 * MIB),
        (2 * MIB, 0, 0, 64 * MIB),
    ],
    ids=["large", "small", "nearly full", "full", "large objects", "unknown"],
)
def test_it_grows_with_the_device_and_leaves_room_beside_the_kv_cache(
    largest: int, free: int, total: int, expected: int
) -> None:
    assert default_buffer_bytes(largest, free, total) == expected
