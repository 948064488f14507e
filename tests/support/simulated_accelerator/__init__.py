"""A simulated accelerator: a torch device whose streams are threads and whose copies wait in queues.

Each stream runs its work in order, and the streams run at the same time, so that a missing wait shows. A test can hold
a stream, which then begins no further work. The device fills freed memory with 0xDB, in the order of the stream that
allocated it. The host cannot touch the device's memory: that ends the process.

:func:`register` compiles ``backend.cpp`` on its first use, in about 15 seconds, and makes the device known to torch in
this process for good. So only processes of their own should use it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.support.accelerator import SIMULATED as DEVICE
from tests.support.accelerator import StreamControl
from tests.support.paths import ROOT


def why_not() -> str | None:
    """Return the reason for which the device cannot be compiled here, if there is one."""
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} to compile the simulated accelerator" if missing else None


def register() -> Control:
    """Compile the device if necessary, make it known to torch, and return the control of its streams."""
    from torch.utils import cpp_extension

    version = f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{torch.__version__}"
    build = ROOT / "build" / "simulated-accelerator" / version
    build.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "2")
    compiled = cpp_extension.load(
        name="simulated_accelerator",
        sources=[str(Path(__file__).with_name("backend.cpp"))],
        build_directory=str(build),
        extra_cflags=["-O0", "-fvisibility=hidden", "-w"],
    )
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.device_count = compiled.device_count
    module.current_device = compiled.current_device
    module.set_device = lambda device: compiled.set_device(torch.device(device).index or 0)
    module.is_available = lambda: True
    module.is_initialized = lambda: not compiled.is_in_bad_fork()
    module._is_in_bad_fork = compiled.is_in_bad_fork
    module._lazy_init = lambda: None
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch.utils.rename_privateuse1_backend(DEVICE)  # type: ignore[attr-defined]
    torch._register_device_module(DEVICE, module)  # type: ignore[no-untyped-call]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)  # type: ignore[attr-defined]
    atexit.register(compiled.close)
    return Control(compiled)


class Control(StreamControl):
    """The control of the simulated device's streams."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._pinned: dict[int, int] = {}
        """The end of each pinned piece of host memory, by its start."""

    def hold(self, stream: Any) -> None:
        """Let the stream begin no further work."""
        self._compiled.hold(stream.device_index, stream.stream_id, True)

    def release(self, stream: Any) -> None:
        """Let the stream work again."""
        self._compiled.hold(stream.device_index, stream.stream_id, False)

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory; see :class:`~offload_core.api.memory.pinned_memory.HostPinning`."""
        self._compiled.pin(address, nbytes)
        self._pinned[address] = address + nbytes

    def unregister(self, address: int) -> None:
        """Unpin host memory; see :class:`~offload_core.api.memory.pinned_memory.HostPinning`."""
        del self._pinned[address]
        self._compiled.unpin(address)

    def priority(self, stream: Any) -> int:
        """Return the priority with which a stream was made."""
        return int(self._compiled.priority(stream.device_index, stream.stream_id))

    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """Copy many pieces by one call on the current stream, as vLLM's function of this name does on CUDA.

        The device reads the descriptors when it copies. It copies nothing if they are gone by then. As CUDA does, it
        refuses a piece that lies in two pinned pieces of host memory (seen on an H100 with ``cuMemcpyBatchAsync``).
        """
        for start, nbytes in zip((*sources.tolist(), *targets.tolist()), 2 * sizes.tolist(), strict=True):
            if any(start < pinned < start + nbytes for pinned in (*self._pinned, *self._pinned.values())):
                raise RuntimeError("a piece of a batched copy crosses a border of pinned memory")
        self._compiled.copy_batch(sources, targets, sizes)

    @property
    def lost_descriptors(self) -> int:
        """Number of batched copies that found their descriptors gone."""
        return int(self._compiled.lost())

    def copies(self) -> int:
        """Return the number of copies that have run."""
        return int(self._compiled.counts()["copies"])
