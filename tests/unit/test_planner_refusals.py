"""What the planner refuses or warns about, and whether the cure that it names is one."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_core.errors import PlanError
from offload_core.planner import GroupGeometry, HybridOffloadPlanner
from tests.unit.geometries import FULL, STATE, Geometry, geometries, window


def plan(
    *groups: GroupGeometry, chunk: int | None, max_model_len: int = 4096, hash_block_size: int = 16
) -> HybridOffloadPlanner:
    return HybridOffloadPlanner.build(
        groups, hash_block_size=hash_block_size, max_model_len=max_model_len, hybrid_chunk_size=chunk
    )


@given(geometry=geometries(), max_model_len=st.integers(1, 120))
def test_what_could_never_be_used_is_refused_with_a_chunk_size_that_works(
    geometry: Geometry, max_model_len: int
) -> None:
    common = math.lcm(*(group.block_size_tokens for group in geometry.groups))
    try:
        assert geometry.plan(max_model_len).boundary_tokens < max_model_len
        return
    except PlanError as error:
        message = str(error)
    cure = re.search(r"set hybrid_chunk_size to (\d+)", message)
    if cure is None:
        assert "raise max_model_len" in message
        assert common >= max_model_len
    else:
        cured = Geometry(geometry.groups, geometry.hash_block_size, int(cure[1])).plan(max_model_len)
        assert cured.boundary_tokens < max_model_len


@given(geometry=geometries(default_chunk=True), max_model_len=st.integers(1, 2000))
def test_the_default_chunk_size_never_warns_and_works_whenever_one_can(geometry: Geometry, max_model_len: int) -> None:
    assume(math.lcm(*(group.block_size_tokens for group in geometry.groups)) < max_model_len)
    assert geometry.plan(max_model_len).warnings == ()


@given(geometry=geometries(default_chunk=False), max_model_len=st.integers(50, 500))
def test_a_chunk_size_named_in_a_warning_works_without_that_warning(geometry: Geometry, max_model_len: int) -> None:
    try:
        planner = geometry.plan(max_model_len)
    except PlanError:
        assume(False)
    for warning in planner.warnings:
        named = re.search(r"the nearest good hybrid_chunk_size is (\d+)", warning)
        if named is not None:
            cured = Geometry(geometry.groups, geometry.hash_block_size, int(named[1])).plan(max_model_len)
            assert not any("not a multiple" in other for other in cured.warnings)
        named = re.search(r"; hybrid_chunk_size (\d+) uses", warning)
        if named is not None:
            cured = Geometry(geometry.groups, geometry.hash_block_size, int(named[1])).plan(max_model_len)
            assert cured.warnings == ()
            assert cured.boundary_tokens < planner.boundary_tokens


@given(geometry=geometries(default_chunk=False))
def test_each_group_whose_blocks_do_not_fill_the_chunk_is_warned_about_once(geometry: Geometry) -> None:
    chunk = geometry.hybrid_chunk_size
    assert chunk is not None
    warned = [w for w in geometry.plan().warnings if "not a multiple" in w]
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
