"""The imports of every run of a tiny model, done once in the server that the runs are forked from.

No import here may start a thread: see :mod:`tests.support.processes`.
"""

from __future__ import annotations

import gc
import importlib
import os
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

for _name in MODULES:
    importlib.import_module(_name)

# Engine start and shutdown collect garbage eight times; without the freeze each would walk all modules.
gc.collect()
gc.freeze()

# The server prints nothing of interest at its own end; a run brings its own output.
with Path(os.devnull).open("wb") as _null:
    for _descriptor in (1, 2):
        os.dup2(_null.fileno(), _descriptor)
