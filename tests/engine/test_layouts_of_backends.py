"""What each attention backend that can be imported without its GPU registers: its specs, layouts, kernel blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

from offload_core.vllm.model.identity import worker_identity
from tests.engine.kv_cache_rig import ATTENTION, LAYOUTS, allocate, by_name, every, vllm_config

ATTENTION_BACKENDS = (
    "CPU_ATTN", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "HPC_ATTN", "B12X",
    "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN",
)  # fmt: skip
LATENT_BACKENDS = (
    "CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE",
    "TOKENSPEED_MLA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE",
)  # fmt: skip


def backends(names: tuple[str, ...]) -> list[Any]:
    """One parameter per backend and layout that it takes."""
    parameters: list[Any] = []
    for name in names:
        layouts = AttentionBackendEnum[name].get_class().supported_kv_cache_layouts() or LAYOUTS
        parameters.extend(pytest.param(name, layout, id=f"{name} {layout.name}") for layout in layouts)
    return parameters


@pytest.mark.parametrize(("name", "layout"), backends(ATTENTION_BACKENDS))
def test_what_each_attention_backend_makes_of_its_specs(name: str, layout: KVCacheLayout) -> None:
    backend = AttentionBackendEnum[name].get_class()
    # vLLM divides blocks into kernel blocks only where each block is one run.
    sizes: dict[str, Any] = {**ATTENTION, "block_size": 256 if layout.is_block_compact else 32}
    if name == "TURBOQUANT":
        sizes |= {"head_size": 128, "dtype": torch.uint8, "kv_quant_mode": KVQuantMode.TURBOQUANT_K8V4}
    full = customize_attention_spec(backend, FullAttentionSpec(**sizes))
    local = customize_attention_spec(backend, SlidingWindowSpec(**sizes, sliding_window=512))
    allocate(every(3, 6, local, full), layout, backend=backend).check()


@pytest.mark.parametrize(("name", "layout"), backends(LATENT_BACKENDS))
def test_what_each_latent_backend_makes_of_its_specs(name: str, layout: KVCacheLayout) -> None:
    backend = AttentionBackendEnum[name].get_class()
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    spec = customize_attention_spec(backend, spec)
    allocate(every(1, 3, spec, spec), layout, backend=backend).check()


def test_kernel_blocks_divide_the_managers_blocks() -> None:
    backend = AttentionBackendEnum.HPC_ATTN.get_class()
    spec = FullAttentionSpec(**{**ATTENTION, "block_size": 256})
    caches = allocate(every(1, 3, spec, spec), KVCacheLayout.LBNHC, backend=backend)
    assert {tensor.shape[0] for tensor in caches.tensors.values()} == {4 * caches.config.num_blocks}
    caches.check()


def test_keys_and_values_in_planes_of_their_own_are_two_runs() -> None:
    backend = AttentionBackendEnum.ROCM_ATTN.get_class()
    spec = customize_attention_spec(backend, FullAttentionSpec(**ATTENTION))
    caches = allocate(every(1, 1, spec, spec), KVCacheLayout.LHBNC, backend=backend)
    assert [len(refs) for refs in caches.canonical().group_refs] == [2]
    caches.check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"])
def test_scales_beside_quantised_tokens_are_stored_with_them(layout: KVCacheLayout, mode: str) -> None:
    backend = AttentionBackendEnum.TRITON_ATTN.get_class()
    dtype = torch.float8_e4m3fn if mode.startswith("FP8") else torch.int8
    plain = FullAttentionSpec(**{**ATTENTION, "dtype": dtype}, kv_quant_mode=KVQuantMode[mode])
    spec = customize_attention_spec(backend, plain)
    assert spec.state_content_size_bytes == (64 if "INT4" not in mode else 32) + 2 * 4
    allocate(every(1, 3, spec, spec), layout, backend=backend).check()


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_nvfp4_keeps_keys_and_values_in_head_slots_of_their_own(layout: KVCacheLayout) -> None:
    spec = FullAttentionSpec(
        **{**ATTENTION, "dtype": torch.uint8},
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=8,
        state_content_bytes=16 + 2,
    )
    allocate(every(1, 3, spec, spec), layout).check()


def test_every_layout_and_its_kernel_blocks_have_an_identity_of_their_own() -> None:
    spec = FullAttentionSpec(**{**ATTENTION, "block_size": 64})
    pages, identities = set(), set()
    for layout in LAYOUTS:
        caches = allocate(every(1, 3, spec, spec), layout)
        description = caches.canonical().describe()
        pages.add(json.dumps(description))
        identities.add(json.dumps([description, worker_identity(vllm_config(), caches.tensors)]))
    split = allocate(
        every(1, 3, spec, spec),
        KVCacheLayout.LBNHC,
        backend=AttentionBackendEnum.ROCM_AITER_FA.get_class(),
    )
    identities.add(json.dumps([split.canonical().describe(), worker_identity(vllm_config(), split.tensors)]))
    assert len(pages) == len(LAYOUTS)
    assert len(identities) == len(LAYOUTS) + 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_name)
def test_the_description_does_not_depend_on_how_many_blocks_there_are(layout: KVCacheLayout) -> None:
    local = SlidingWindowSpec(**ATTENTION, sliding_window=64)
    specs = every(3, 6, local, FullAttentionSpec(**ATTENTION))
    few, many = (allocate(specs, layout, extra_blocks=extra) for extra in (0, 17))
    assert few.canonical().describe() == many.canonical().describe()
