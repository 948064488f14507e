"""The planner's refusals and warnings, and a proof of the cures that they name."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_core.api.errors import PlanError
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner
from tests.support.geometries import FULL, STATE, Geometry, any_geometries, chunked, geometries, window
from tests.support.random_examples import examples


def plan(
    *groups: GroupGeometry, chunk: int | None, max_model_len: int = 4096, hash_block_size: int = 16
) -> HybridOffloadPlanner:
    return HybridOffloadPlanner.build(
        groups, hash_block_size=hash_block_size, max_model_len=max_model_len, hybrid_chunk_size=chunk
    )


def refusal(geometry: Geometry, max_model_len: int) -> str | None:
    try:
        planner = geometry.plan(max_model_len)
    except PlanError as error:
        return str(error)
    assert planner.packs
    assert planner.boundary_tokens < max_model_len
    return None


@examples(300)
@given(geometry=any_geometries(), max_model_len=st.integers(1, 200))
def test_what_could_never_be_used_is_refused_with_numbers_that_work(geometry: Geometry, max_model_len: int) -> None:
    message = refusal(geometry, max_model_len)
    if message is None:
        return
    raised = re.search(r"raise max_model_len to (\d+) or more", message)
    chunk = re.search(r"set hybrid_chunk_size to (\d+)", message)
    if chunk is not None:
        assert refusal(geometry.with_chunk(int(chunk[1])), int(raised[1]) if raised else max_model_len) is None
    if raised is not None or chunk is None:  # then no chunk size would have done
        assert all(refusal(geometry.with_chunk(size), max_model_len) for size in range(1, max_model_len))
    if chunk is None:
        assert "turn offloading off" in message
        assert all(refusal(geometry.with_chunk(size), 1 << 20) for size in range(1, 100))


def test_a_chunk_size_that_only_some_blocks_fill_is_named_where_no_other_works() -> None:
    groups = [GroupGeometry(0, 1, chunked(4)), GroupGeometry(1, 3, chunked(2))]
    with pytest.raises(PlanError, match=r"set hybrid_chunk_size to 2$"):
        plan(*groups, chunk=12, hash_block_size=1)
    assert plan(*groups, chunk=2, hash_block_size=1).boundary_tokens == 6
    assert plan(*groups, chunk=None, hash_block_size=1).hybrid_chunk_size == 2


def test_a_chunk_size_that_only_some_blocks_fill_is_warned_about_though_none_does_better() -> None:
    groups = [GroupGeometry(0, 2, chunked(3)), GroupGeometry(1, 4, chunked(8))]
    (warning,) = plan(*groups, chunk=6, hash_block_size=1).warnings
    assert warning.startswith("group 1: ")
    assert warning.endswith("block by block; none does better")
    assert plan(*groups, chunk=None, hash_block_size=1).warnings == ()


@given(geometry=any_geometries(), max_model_len=st.integers(1, 2000))
def test_the_default_chunk_size_never_warns_and_works_whenever_one_can(geometry: Geometry, max_model_len: int) -> None:
    by_default = geometry.with_chunk(None)
    if refusal(by_default, max_model_len) is None:
        assert by_default.plan(max_model_len).warnings == ()
    else:
        assert refusal(geometry, max_model_len) is not None


@given(geometry=geometries(default_chunk=False), max_model_len=st.integers(50, 500))
def test_a_chunk_size_named_in_a_warning_works_without_that_warning(geometry: Geometry, max_model_len: int) -> None:
    try:
        planner = geometry.plan(max_model_len)
    except PlanError:
        assume(False)
    for warning in planner.warnings:
        named = re.search(r"the nearest good hybrid_chunk_size is (\d+)", warning)
        if named is not None:
            cured = geometry.with_chunk(int(named[1])).plan(max_model_len)
            assert not any("not a multiple" in other for other in cured.warnings)
        named = re.search(r"; with hybrid_chunk_size (\d+), at multiples of (\d+)$", warning)
        if named is not None:
            cured = geometry.with_chunk(int(named[1])).plan(max_model_len)
            assert cured.boundary_tokens == int(named[2]) < planner.boundary_tokens
        named = re.search(r"; hybrid_chunk_size (\d+) uses", warning)
        if named is not None:
            cured = geometry.with_chunk(int(named[1])).plan(max_model_len)
            assert cured.warnings == ()
            assert cured.boundary_tokens < planner.boundary_tokens


@given(geometry=geometries(default_chunk=False))
def test_each_group_whose_blocks_do_not_fill_the_chunk_is_warned_about_once(geometry: Geometry) -> None:
    chunk = geometry.hybrid_chunk_size
    assert chunk is not None
    warned = [w for w in geometry.plan().warnings if "is stored block by block" in w]
    odd = [g.index for g in geometry.groups if g.block_size_tokens < chunk and chunk % g.block_size_tokens]
    assert [int(w.split(":")[0].removeprefix("group ")) for w in warned] == odd


def test_the_nearest_good_chunk_size_is_the_nearest_below_max_model_len() -> None:
    group = GroupGeometry(3, 16, FULL)
    (warning,) = plan(group, chunk=1000).warnings
    assert warning.startswith("group 3: hybrid_chunk_size 1000 is not a multiple of its block size 16")
    assert warning.endswith("the nearest good hybrid_chunk_size is 1008")
    (warning,) = plan(group, chunk=1999, max_model_len=2000).warnings
    assert warning.endswith("the nearest good hybrid_chunk_size is 1984")


def test_a_chunk_that_skips_recurrent_states_is_warned_about() -> None:
    (warning,) = plan(GroupGeometry(0, 64, FULL), GroupGeometry(1, 64, STATE), chunk=256).warnings
    assert warning.startswith("group 1 is recurrent")
    assert "hybrid_chunk_size 64 uses" in warning


def test_boundaries_further_apart_than_any_unit_are_warned_about() -> None:
    (warning,) = plan(GroupGeometry(0, 16, FULL), GroupGeometry(1, 1056, FULL), chunk=256, max_model_len=9000).warnings
    assert warning == (
        "group 1: its block size 1056 is not a multiple of hybrid_chunk_size 256, so prefixes can be loaded only at "
        "multiples of 8448 tokens; with hybrid_chunk_size 1056, at multiples of 1056"
    )


def test_attention_chunks_that_units_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError) as refused:
        plan(GroupGeometry(0, 16, FULL), GroupGeometry(1, 16, chunked(8192)), chunk=768, max_model_len=32768)
    assert str(refused.value).startswith(
        "group 1 has chunked local attention of 8192 tokens and, with block size 16 and hybrid_chunk_size 768, units "
        "of 768 tokens; neither is a multiple of the other"
    )
    assert str(refused.value).endswith("; set hybrid_chunk_size to 512")


def test_a_model_that_never_needs_its_cache_at_a_boundary_has_nothing_to_offload() -> None:
    with pytest.raises(
        PlanError, match=r"multiples of 64 .*group 7: chunked local attention of 32 tokens.*nothing to "
    ):
        plan(GroupGeometry(7, 64, chunked(32)), chunk=64)


def test_no_group_is_refused() -> None:
    with pytest.raises(PlanError, match="no KV cache group takes part in prefix caching"):
        plan(chunk=256)


def test_a_block_size_that_is_not_a_multiple_of_the_hash_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match="group 2: block size 24 is not a multiple of the engine's hash block size 16"):
        plan(GroupGeometry(2, 24, FULL), chunk=48)


@pytest.mark.parametrize("chunk", [0, -256])
def test_a_chunk_size_below_one_is_refused_with_a_good_one(chunk: int) -> None:
    with pytest.raises(PlanError, match=rf"hybrid_chunk_size is {chunk}; it must be .*for example 256"):
        plan(GroupGeometry(0, 16, window(64)), chunk=chunk)


def test_the_last_token_is_always_computed_so_one_boundary_at_max_model_len_is_none() -> None:
    group = GroupGeometry(0, 16, FULL)
    with pytest.raises(PlanError, match="nothing could ever be loaded; set hybrid_chunk_size to 256"):
        plan(group, chunk=512, max_model_len=512)
    assert plan(group, chunk=512, max_model_len=513).boundary_tokens == 512


def test_one_attention_chunk_may_make_another_too_small_to_be_divided() -> None:
    groups = [GroupGeometry(index, 16, policy) for index, policy in enumerate((FULL, chunked(24), chunked(64)))]
    assert plan(*groups, chunk=None).hybrid_chunk_size == 192


def test_boundaries_at_which_the_engine_cannot_go_on_are_refused_with_a_chunk_size_that_works() -> None:
    geometry = [GroupGeometry(0, 16, FULL)]
    with pytest.raises(PlanError, match=r"256 tokens apart, .* only at multiples of 1056 tokens") as refused:
        HybridOffloadPlanner.build(geometry, hash_block_size=16, max_model_len=1 << 17, scheduler_block_size=1056)
    chunk = re.search(r"set hybrid_chunk_size to (\d+)$", str(refused.value))
    assert chunk is not None
    planner = HybridOffloadPlanner.build(
        geometry,
        hash_block_size=16,
        max_model_len=1 << 17,
        hybrid_chunk_size=int(chunk[1]),
        scheduler_block_size=1056,
    )
    assert planner.boundary_tokens == 8448
