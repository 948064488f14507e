"""The size of the staging pool."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.staging_size import StagingUse, largest_payload_bytes, smallest_pool_bytes

USES = st.lists(st.builds(StagingUse, st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=3)


@given(st.integers(1 << 20, 1 << 36), USES)
def test_the_largest_payload_is_the_last_one_that_fits(pool_bytes: int, uses: list[StagingUse]) -> None:
    largest = largest_payload_bytes(pool_bytes, uses)
    if largest:
        assert smallest_pool_bytes(largest, uses) <= pool_bytes
    assert smallest_pool_bytes(largest + 1, uses) > pool_bytes
