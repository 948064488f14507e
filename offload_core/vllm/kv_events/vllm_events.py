"""vLLM's KV cache events, made with the fields that the installed version has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


def kv_events_enabled(vllm_config: VllmConfig) -> bool:
    """Return whether the engine publishes KV cache events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def events_name_tiers() -> bool:
    """Return whether a KV cache event can name its tier, so that tiers on one medium differ. Older versions cannot."""
    return "ownership" in BlockStored.__struct_fields__


def event_medium(medium: str) -> str:
    """Return vLLM's word for a backend's kind of medium."""
    return "CPU" if medium == "host" else "STORAGE"


def event_block_hash(block_hash: bytes) -> Any:
    """Return a block hash in the form that the engine's own events have: bytes, or an integer of 64 bits."""
    return maybe_convert_block_hash(block_hash)


def event_group_fields(spec: KVCacheSpec) -> dict[str, Any]:
    """Return the fields of a ``BlockStored`` that describe a group; older versions have none."""
    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    if kind is None or window is None:
        return {}
    return {"kv_cache_spec_kind": kind(spec).value, "kv_cache_spec_sliding_window": window(spec)}


def block_extra_keys(request: Request, spans: Iterable[tuple[int, int]]) -> list[Any] | None:
    """Return the parts of some blocks' identity besides tokens, as in the engine's events; ``None`` if there are none.

    Args:
        spans: the first token and the end of each block.
    """
    if not (request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return None
    keys = [generate_block_hash_extra_keys(request, start, end, 0)[0] for start, end in spans]
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)  # before 0.32, keys have no tags
    return list(keys if untagged is None else untagged(keys))


def block_stored(**fields: Any) -> Any:
    """Return the event for stored blocks, without the fields that this version does not have."""
    return _event(BlockStored, fields)


def block_removed(**fields: Any) -> Any:
    """Return the event for removed blocks, without the fields that this version does not have."""
    return _event(BlockRemoved, fields)


def _event(kind: Any, fields: dict[str, Any]) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
