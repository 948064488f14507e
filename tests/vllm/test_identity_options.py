"""Each option of the engine that decides the bytes of the KV cache is part of the engine's fingerprint (I7)."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, ModelConfig, MultiModalConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding

from offload_core.objects.fingerprint import fingerprint
from offload_core.vllm.model.identity import engine_identity
from offload_core.vllm.model.jsonable import jsonable
from offload_core.vllm.model.options import options_identity
from tests.support.tiny_models import write_gemma3, write_phi3

ORIGINAL_LENGTH = 512
"""Up to this length, the tiny Phi-3 turns its keys by other factors."""

COUNTS = {
    ModelConfig: {
        "dtype", "hf_config", "hf_text_config", "max_model_len", "model", "model_class_overrides", "model_weights",
        "multimodal_config", "override_generation_config", "generation_config", "quantization", "quantization_config",
        "seed", "revision", "code_revision", "tokenizer", "tokenizer_revision", "hf_config_path", "hf_overrides",
        "config_format", "disable_sliding_window", "word_embeddings_untied_by_checkpoint", "is_submodel_config",
    },
    MultiModalConfig: {
        "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method",
    },
    LoRAConfig: {"target_modules", "enable_tower_connector_lora"},
}  # fmt: skip
"""Fields of vLLM's configuration that are in the identity, or that only lead to what is in it."""
DOES_NOT_COUNT = {
    # How it runs and is served, what is sampled from the logits, and how far results are rounded.
    ModelConfig: {
        "runner", "convert", "tokenizer_mode", "trust_remote_code", "allowed_local_media_path", "allowed_media_domains",
        "spec_target_max_model_len", "allow_deprecated_quantization", "enforce_eager", "return_sampling_mask",
        "enable_return_routed_experts",
        "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "enable_trace_replay", "disable_cascade_attn",
        "skip_tokenizer_init", "enable_prompt_embeds", "served_model_name", "hf_token", "enable_sleep_mode",
        "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
        "enable_nccl_comm_suspend", "enable_cumem_allocator", "model_impl", "logits_processors", "io_processor_plugin",
        "renderer_num_workers", "pooler_config", "original_max_model_len",
    },
    # The number of inputs, their way to the model, and how their hash is made: it names the blocks.
    MultiModalConfig: {
        "language_model_only", "limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb",
        "mm_processor_cache_type", "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_only",
        "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin", "interleave_mm_strings", "skip_mm_profiling", "mm_tensor_ipc",
        "allow_missing_mm_embeddings", "mm_ipc_gpu_memory_gb",
    },
    # An adapter's files and name are part of the keys of its requests.
    LoRAConfig: {
        "max_lora_rank", "max_loras", "fully_sharded_loras", "max_cpu_loras", "lora_dtype", "default_mm_loras",
        "specialize_active_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels",
    },
}  # fmt: skip


def engine_of(folder: Path, **options: Any) -> Any:
    """vLLM's own configuration of a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        return EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, **options).create_engine_config()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a small Gemma 3 without further options."""
    return engine_of(write_gemma3(tmp_path_factory.mktemp("models") / "gemma3"), max_model_len=1024)


@pytest.fixture
def engine(made: Any) -> Any:
    """The configuration of a small Gemma 3, which a test may change."""
    config = copy.copy(made)
    config.model_config = copy.copy(made.model_config)
    config.attention_config = copy.copy(made.attention_config)
    return config


def fingerprint_of(engine: Any) -> str:
    groups: Any = SimpleNamespace(kv_cache_groups=[])
    return fingerprint(engine_identity(engine, groups, given_name="the model"))


def rotated_keys(engine: Any) -> torch.Tensor:
    """Return random keys as vLLM's rotary embedding turns them at the first positions."""
    config = engine.model_config.hf_config
    rotary_embedding._ROPE_DICT.clear()
    head = config.hidden_size // config.num_attention_heads
    with set_current_vllm_config(engine):
        rope = rotary_embedding.get_rope(
            head, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(16, head, generator=generator)
    _, keys = rope(torch.arange(300, 316), states.clone(), states.clone())
    assert isinstance(keys, torch.Tensor)
    return keys


@pytest.mark.every_version
def test_a_length_that_turns_keys_otherwise_is_another_identity(tmp_path: Path) -> None:
    folder = write_phi3(tmp_path / "phi3", original_length=ORIGINAL_LENGTH)
    short, long = (engine_of(folder, max_model_len=length) for length in (ORIGINAL_LENGTH, 4 * ORIGINAL_LENGTH))

    assert not torch.equal(rotated_keys(short), rotated_keys(long))
    assert fingerprint_of(short) != fingerprint_of(long)
    assert fingerprint_of(short) == fingerprint_of(engine_of(folder, max_model_len=ORIGINAL_LENGTH))


@pytest.mark.every_version
def test_models_without_such_an_embedding_share_objects_at_all_lengths(made: Any) -> None:
    assert options_identity(made) == {}
    assert fingerprint_of(made) == fingerprint_of(engine_of(Path(made.model_config.model), max_model_len=2048))


@pytest.mark.every_version
def test_vllms_own_defaults_add_nothing(engine: Any) -> None:
    engine.model_config.multimodal_config, engine.lora_config = MultiModalConfig(), LoRAConfig()
    assert options_identity(engine) == {}


@pytest.mark.parametrize(
    ("place", "option", "values"),
    [
        ("model_config", "quantization_config", [{"linear": "fp8"}, {"linear": "fp8", "ignore": ["re:.*v_proj"]}]),
        ("model_config", "model_class_overrides", [{"A": "a:A"}, {"A": "b:A"}]),
        ("model_config", "multimodal_config", [
            SimpleNamespace(mm_processor_kwargs={"do_normalize": False}),
            SimpleNamespace(mm_processor_kwargs={"do_normalize": True}),
            SimpleNamespace(media_io_kwargs={"video": {"fps": 1.0}}),
            SimpleNamespace(video_pruning_rate=0.5),
            SimpleNamespace(mm_device_do_normalize=False),
        ]),
        ("attention_config", "use_non_causal", [True]),
        (None, "lora_config", [
            SimpleNamespace(target_modules=["q_proj"]), SimpleNamespace(enable_tower_connector_lora=True),
        ]),
        (None, "additional_config", [{"a": 1}, {"a": 2}, SimpleNamespace(compute_hash=lambda: "hash")]),
    ],
)  # fmt: skip
def test_each_value_of_an_option_has_an_identity_of_its_own(
    engine: Any, place: str | None, option: str, values: list[Any]
) -> None:
    seen = {fingerprint_of(engine)}
    for value in values:
        setattr(engine if place is None else getattr(engine, place), option, value)
        seen.add(fingerprint_of(engine))
    assert len(seen) == 1 + len(values)


def test_the_scales_of_an_encoder_count_by_their_content(engine: Any, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    engine.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=str(scales))
    seen = set()
    for content in ("{}", '{"q": 2}'):
        scales.write_text(content)
        seen.add(fingerprint_of(engine))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("max_model_len", "defaults", "override", "tuned"),
    [
        (32768, {}, {}, False),
        (32769, {}, {}, True),
        (32769, {"attn_temperature_tuning": False}, {}, False),
        (1024, {"attn_temperature_tuning": False}, {"attn_temperature_tuning": True}, True),
    ],
)
def test_llama_4_counts_whether_its_queries_are_scaled(
    max_model_len: int, defaults: dict[str, Any], override: dict[str, Any], tuned: bool
) -> None:
    model = SimpleNamespace(
        architectures=["Llama4ForConditionalGeneration"],
        hf_config=SimpleNamespace(to_dict=lambda: {"text_config": {"rope_scaling": {"rope_type": "llama3"}}}),
        try_get_generation_config=lambda: dict(defaults),
        override_generation_config=override,
        max_model_len=max_model_len,
    )
    engine: Any = SimpleNamespace(model_config=model)
    assert options_identity(engine) == {"attn_temperature_tuning": tuned}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "longrope"}},
        {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding": {}}}},
        {"rope_parameters": {"rope_type": "dynamic"}},
        {"layers": [{"rope": {"type": "of another maker"}}]},
    ],
    ids=json.dumps,
)
def test_a_rotary_embedding_that_nobody_has_looked_at_counts_with_the_length(config: dict[str, Any]) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"type": "x", **config}), max_model_len=4096)
    engine: Any = SimpleNamespace(model_config=model)
    assert options_identity(engine) == {"max_model_len": 4096}


@pytest.mark.every_version
@pytest.mark.parametrize("config", COUNTS, ids=lambda config: config.__name__)
def test_every_field_of_the_installed_vllm_was_looked_at(config: Any) -> None:
    """A field that is new in vLLM belongs to one of the two lists above, and maybe to the identity."""
    known = COUNTS[config] | DOES_NOT_COUNT[config]
    assert {field.name for field in fields(config)} - known == set()


def test_a_set_has_one_form_in_all_processes() -> None:
    assert jsonable({"b", "a", "c"}) == ["a", "b", "c"]
