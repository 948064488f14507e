"""SGLang's host pools with random bytes, for checks that call a storage backend directly."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from tests.elsewhere.sglang.machinery import PLUGIN

PAGE = 4
TOKENS = 64


def rank(**fields: Any) -> Any:
    """Return SGLang's description of one rank."""
    usual = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "a-model",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**usual, **fields})


def kv_pool(layout: str = "page_first", **geometry: Any) -> Any:
    """Make a host pool of KV pages."""
    usual = {"page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 8, "layer_num": 3}
    made = {**usual, **geometry}
    device = MHATokenToKVPool(TOKENS, device="cpu", enable_memory_saver=False, **made)
    return _filled(MHATokenToKVPoolHost(_info(device), 2.0, 0, made["page_size"], layout, **_host(made["layer_num"])))


def latent_pool(layout: str = "page_first") -> Any:
    """Make a host pool of latent pages (MLA), which all ranks have alike."""
    device = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 16, 8, 3, "cpu", False)
    return _filled(MLATokenToKVPoolHost(_info(device), 2.0, 0, PAGE, layout, target_layer_num=3, **_host(3)))


def state_pool() -> Any:
    """Make a host pool of recurrent states, each of which is a page."""
    states = MambaStateBufferInfo(temporal=torch.zeros(2, 16, 4, 8), conv=(torch.zeros(2, 16, 5, 3),))
    pool = MambaPoolHost(states, 2.0, 0, device_capacity=16, layout="page_first")
    for number, buffer in enumerate((pool.temporal_buffer, *pool.conv_buffer)):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(number)))
    return pool


def backend(keys: dict[str, Any], kv: Any, config: Any = None, interface_v1: int = 1, **pools: Any) -> Any:
    """Make our backend with SGLang's factory, and register pools as its controllers do."""
    config = rank() if config is None else config
    config.extra_config = {**PLUGIN, "interface_v1": interface_v1, **keys}
    made = StorageBackendFactory.create_backend("dynamic", config, kv)
    try:
        made.register_mem_pool_host(kv)
        for name, pool in pools.items():
            made.register_mem_host_pool_v2(pool, name)
        made.on_host_pools_registered()
    except Exception:
        made.close()
        raise
    return made


def rows(*pages: int, page_size: int = PAGE) -> torch.Tensor:
    """Return the host indices of pages."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def content(pool: Any, page: int) -> bytes:
    """Return the bytes of a page."""
    return bytes(pool.get_data_page(page * (pool.page_size or 1), flat=True).contiguous().view(torch.uint8).numpy())


def _info(device_pool: Any) -> Any:
    (found,) = device_pool.get_device_pool_infos()
    return found.buffer_info


def _host(layers: int) -> dict[str, Any]:
    return {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": layers}


def _filled(pool: Any) -> Any:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))
    return pool
