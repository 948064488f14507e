"""SGLang's host pools on a CPU: no pinned memory, and plain copies from and to the device pools."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.test.kits.unified_radix_cache import fixtures


def _back_up_kv(pool: Any, device_pool: object, host: Any, device: Any, io_backend: str) -> None:
    for layer in range(pool.layer_num):
        pool.k_data_refs[layer][host] = pool.device_k_buffers[layer][device]
        pool.v_data_refs[layer][host] = pool.device_v_buffers[layer][device]


def _load_kv(
    pool: Any, device_pool: object, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
) -> None:
    pool.device_k_buffers[layer][device] = pool.k_data_refs[layer][host]
    pool.device_v_buffers[layer][device] = pool.v_data_refs[layer][host]


def _states(pool: Any, layer: int) -> list[tuple[Any, Any]]:
    """Return a layer's states in the host pool, each with those on the device."""
    pairs = [(pool.temporal_buffer[:, layer, 0], pool.temporal_device_layers[layer])]
    return pairs + [
        (buffer[:, layer, 0], layers[layer])
        for buffer, layers in zip(pool.conv_buffer, pool.conv_device_layers, strict=True)
    ]


def _back_up_states(pool: Any, device_pool: object, host: Any, device: Any, io_backend: str = "kernel") -> None:
    for layer in range(pool.num_mamba_layers):
        for on_host, on_device in _states(pool, layer):
            on_host[host] = on_device[device]


def _load_states(
    pool: Any, device_pool: object, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
) -> None:
    for on_host, on_device in _states(pool, layer):
        on_device[device] = on_host[host]


HostKVCache.pin_memory = property(lambda pool: False, lambda pool, value: None)
MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_kv
MHATokenToKVPoolHost.load_to_device_per_layer = _load_kv
MambaPoolHost.backup_from_device_all_layer = _back_up_states
MambaPoolHost.load_to_device_per_layer = _load_states
fixtures.get_device = lambda: "cpu"
