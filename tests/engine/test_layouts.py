"""Every KV cache layout of vLLM, made by vLLM's own code from real specs: never a wrong byte. No engine is started."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups

from offload_core.api.errors import UnsupportedLayoutError
from tests.engine.kv_cache_rig import (
    ATTENTION,
    BLOCK_COMPACT,
    BLOCK_OUTERMOST,
    LAYOUTS,
    allocate,
    by_name,
    deepseek_v4,
    every,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_gemma3_4b_has_34_layers_in_5_tensors(layout: KVCacheLayout) -> None:
    sizes: dict[str, Any] = {**ATTENTION, "head_size": 256}
    specs = every(6, 34, SlidingWindowSpec(**sizes, sliding_window=1024), FullAttentionSpec(**sizes))
    caches = allocate(specs, layout)
    assert [len(group.layer_names) for group in caches.config.kv_cache_groups] == [5, 5, 5, 5, 5, 4, 5]
    canonical = caches.canonical()
    runs = 1 if layout.is_block_compact else sizes["num_kv_heads"]  # heads outside the layer's page are runs apart
    assert len(canonical.tensors) == 5 * runs
    assert [len(refs) for refs in canonical.group_refs] == [n * runs for n in (5, 5, 5, 5, 5, 4, 5)]
    assert [region.length_bytes for region in canonical.regions()] == [caches.config.kv_cache_tensors[0].size]
    caches.check()


@pytest.mark.parametrize("layout", BLOCK_OUTERMOST, ids=by_name)
@pytest.mark.parametrize(("content", "alignment"), [(584, 576), (None, 512)], ids=["fp8_ds_mla", "plain"])
def test_deepseek_v4_packs_pages_of_five_block_sizes(
    layout: KVCacheLayout, content: int | None, alignment: int
) -> None:
    caches = allocate(deepseek_v4(6, content=content, alignment=alignment), layout)
    groups = caches.config.kv_cache_groups
    assert [group.kv_cache_spec.block_size for group in groups] == [64, 64, 256, 4, 8]
    strides = {tensor.block_stride_bytes for tensor in caches.canonical().tensors}
    assert strides == {caches.config.kv_cache_tensors[0].block_stride}
    assert strides.pop() > max(page for group in groups for page in _page_sizes(group))
    caches.check()


def _page_sizes(group: KVCacheGroupSpec) -> set[int]:
    spec = group.kv_cache_spec
    return {s.page_size_bytes for s in spec.kv_cache_specs.values()} if hasattr(spec, "kv_cache_specs") else set()


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=by_name)
@pytest.mark.parametrize(
    ("block_size", "state_dtype", "heads"),
    [(1056, torch.float32, 32), (544, torch.bfloat16, 32), (528, torch.float32, 16)],
    ids=["qwen3.5 1056", "qwen3-next 544", "qwen3-next tp2 528"],
)
def test_delta_net_states_share_pages_with_attention(
    layout: KVCacheLayout, block_size: int, state_dtype: torch.dtype, heads: int
) -> None:
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=block_size,
        shapes=((3, 256 * heads), (heads, 128, 128)),
        dtypes=(torch.bfloat16, state_dtype),
        mamba_cache_mode="align",
    )
    assert state.page_size_bytes < attention.page_size_bytes
    caches = allocate(every(4, 4, state, attention), layout)
    assert len(caches.config.kv_cache_groups) == 4
    caches.check()


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=by_name)
@pytest.mark.parametrize(
    "shapes",
    [((4, 48),), ((2, 40), (8, 4)), ((3, 40), (4, 8, 8), (2, 4), (2, 2), (3,))],
    ids=["short conv", "mamba", "replay ssm"],
)
def test_states_of_one_to_five_parts(layout: KVCacheLayout, shapes: tuple[tuple[int, ...], ...]) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)[: len(shapes)]
    state = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    allocate(every(3, 6, state, FullAttentionSpec(**ATTENTION)), layout).check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_llama4_chunked_local_layers(layout: KVCacheLayout) -> None:
    local = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=8192)
    allocate(every(4, 8, local, FullAttentionSpec(**ATTENTION)), layout).check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_deepseek_v3_latents(layout: KVCacheLayout) -> None:
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    allocate(every(1, 4, latent, latent), layout).check()


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=by_name)
def test_latents_beside_an_indexer_are_pages_of_two_sizes_in_one_group(layout: KVCacheLayout) -> None:
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656, alignment=576
    )
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    caches = allocate(every(2, 6, latent, index), layout)
    assert len(caches.config.kv_cache_groups) == 1
    caches.check()


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=by_name)
def test_full_layers_of_unequal_heads_in_one_group(layout: KVCacheLayout) -> None:
    narrow, wide = FullAttentionSpec(**ATTENTION), FullAttentionSpec(**{**ATTENTION, "num_kv_heads": 7})
    caches = allocate(every(3, 7, narrow, wide), layout)
    assert len(caches.config.kv_cache_groups) == 1
    caches.check()


@pytest.mark.parametrize("layout", BLOCK_COMPACT, ids=by_name)
@pytest.mark.parametrize("full_heads", [8, 7], ids=["larger blocks", "padded pages"])
def test_groups_of_unequal_heads(layout: KVCacheLayout, full_heads: int) -> None:
    local = SlidingWindowSpec(**ATTENTION, sliding_window=64)
    full = FullAttentionSpec(**{**ATTENTION, "num_kv_heads": full_heads})
    allocate(every(3, 6, local, full), layout).check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_values_of_another_size_than_keys(layout: KVCacheLayout) -> None:
    spec = FullAttentionSpec(**ATTENTION, head_size_v=24)
    allocate(every(1, 3, spec, spec), layout).check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
@pytest.mark.parametrize("tokens_per_state", [4, Fraction(1, 4)], ids=str)
def test_states_that_are_not_one_per_token(layout: KVCacheLayout, tokens_per_state: int | Fraction) -> None:
    spec = FullAttentionSpec(**ATTENTION, tokens_per_state=tokens_per_state)
    caches = allocate(every(1, 3, spec, spec), layout)
    assert {tensor.shape[2] for tensor in caches.tensors.values()} == {16 / tokens_per_state}
    caches.check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_layers_that_reuse_another_layers_cache_are_stored_once(layout: KVCacheLayout) -> None:
    local = SlidingWindowSpec(**ATTENTION, sliding_window=64)
    caches = allocate(every(3, 6, local, FullAttentionSpec(**ATTENTION)), layout)
    before = caches.canonical().describe()
    groups = caches.config.kv_cache_groups
    shared = {f"model.layers.{6 + index}.self_attn.attn": group.layer_names[-1] for index, group in enumerate(groups)}
    add_kv_sharing_layers_to_kv_cache_groups(shared, groups)
    caches.tensors.update({name: caches.tensors[target] for name, target in shared.items()})
    after = caches.check().describe()
    assert (after["tensors"], after["groups"]) == (before["tensors"], before["groups"])


def test_a_layer_that_reuses_a_cache_in_a_group_with_one_spec_per_layer() -> None:
    narrow, wide = FullAttentionSpec(**ATTENTION), FullAttentionSpec(**{**ATTENTION, "num_kv_heads": 7})
    caches = allocate(every(3, 3, narrow, wide), KVCacheLayout.LBHNC)
    (group,) = caches.config.kv_cache_groups
    before = caches.canonical().describe()
    target = group.layer_names[-1]
    add_kv_sharing_layers_to_kv_cache_groups({"model.layers.9.self_attn.attn": target}, [group])
    caches.tensors["model.layers.9.self_attn.attn"] = caches.tensors[target]
    assert caches.check().describe() == before
    caches.tensors["model.layers.9.self_attn.attn"] = torch.zeros(3, 4)
    with pytest.raises(UnsupportedLayoutError, match=r"layer model\.layers\.9\..*no spec for it.*\(3, 4\)"):
        caches.canonical()
