"""The stand-ins with which SGLang's cache runs on a CPU, in a process of its own. Import this before SGLang.

SGLang's prefix tree, controllers, host pools, storage factory and file backend are the real ones. These are not:

- torchvision, which SGLang imports for image models only, and which has no build for this torch;
- one base class of SGLang's test kit, whose module needs a package of data sets;
- pinned memory, and the copies between device and host pools: plain copies of tensors do the same on a CPU.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import unittest
import warnings
from typing import Any

import transformers.utils.import_utils  # noqa: F401  # it must look for torchvision before the stand-in is there

warnings.simplefilter("ignore")  # SGLang's imports say that there is no accelerator


class _Torchvision(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
    _module = _Torchvision(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    sys.modules[_name] = _module

_utils: Any = types.ModuleType("sglang.test.test_utils")
_utils.CustomTestCase = unittest.TestCase
sys.modules["sglang.test.test_utils"] = _utils

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
