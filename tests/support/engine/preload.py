"""The imports of every run of a tiny model, done once in the server that the runs are forked from.

No import here may start a thread: see :mod:`tests.support.processes`.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from pathlib import Path

MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.renderers.hf",
    "tests.support.engine.engine_run",
    "tests.support.engine.fault_run",
    "tests.support.engine.poisoning",
    "tests.support.engine.stock_ram_spec",
    "offload_backend_cpu.plugin",
    "offload_backend_disk.plugin",
    "offload_backend_lmcache.plugin",
    "offload_backend_mooncake.plugin",
    "offload_backend_nfs.plugin",
    "offload_backend_nixl.plugin",
)


def _nothing() -> None:
    """Take the place of a function of which a run needs nothing."""


for _name in MODULES:
    importlib.import_module(_name)

from vllm.platforms import current_platform  # noqa: E402

# At each start a worker looks through all modules for the kernels that it replaces. Once is enough: its forks see the
# replacements, and so does each module that they import later. Older versions of vLLM have no such function.
if (_replace_kernels := getattr(current_platform, "register_triton_kernel_overrides", None)) is not None:
    with warnings.catch_warnings(action="ignore"):  # each look at torch finds what is deprecated there
        _replace_kernels()
    type(current_platform).register_triton_kernel_overrides = staticmethod(_nothing)

# Engine start and shutdown collect garbage eight times; without the freeze each would walk all modules. At its shutdown
# vLLM lifts the freeze, so that a fork would touch, and with it copy, every object that it shares with the server.
gc.collect()
gc.freeze()
gc.unfreeze = _nothing

# The server prints nothing of interest at its own end; a run brings its own output.
with Path(os.devnull).open("wb") as _null:
    for _descriptor in (1, 2):
        os.dup2(_null.fileno(), _descriptor)
