"""Page-locked ("pinned") host memory: a GPU copies to and from it at full speed, and the system never swaps it out.

This module reaches CUDA through torch. It imports torch only when a caller demands pinned memory. A process that has
not loaded torch does not use a GPU.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

_PORTABLE = 1
"""``cudaHostRegisterPortable``: the memory is pinned for every GPU of the process, and not only for the current one."""


class HostPinning(Protocol):
    """An interface that pins memory of this process.

    Both methods may run on any thread, and may take seconds for large memory: do not call them on the event loop. The
    caller owns the memory.
    """

    def register(self, address: int, nbytes: int) -> None:
        """Pin ``nbytes`` bytes from ``address`` on. Both must be multiples of the system's page size.

        Raises:
            OSError: the memory cannot be pinned.
        """

    def unregister(self, address: int) -> None:
        """Unpin the memory that was registered at ``address``. Call this before you free the memory.

        Raises:
            OSError: the memory cannot be unpinned.
        """


class CudaPinning:
    """Pinning by CUDA, for the GPU that is current on the constructing thread.

    Args:
        torch: the module ``torch``.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        # Each thread has its own current GPU. Another thread would otherwise allocate memory on the first GPU.
        self._device = self._cuda.current_device()

    def register(self, address: int, nbytes: int) -> None:
        """See :meth:`HostPinning.register`."""
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            raise OSError(
                f"CUDA could not pin {nbytes} bytes of host memory: cudaHostRegister returned error {code}; configure "
                "a smaller size, or raise the limit on locked memory (ulimit -l, or the container's limit)"
            )

    def unregister(self, address: int) -> None:
        """See :meth:`HostPinning.unregister`."""
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostUnregister(address))
        if code:
            raise OSError(f"CUDA could not unpin the host memory at {address:#x}: cudaHostUnregister returned {code}")


def pinning_in_use() -> CudaPinning | None:
    """Return a way to pin memory if this process uses a GPU already, else ``None``.

    The function neither loads torch nor starts CUDA. Call it on the thread that has selected the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return CudaPinning(torch)


def demand_pinning() -> CudaPinning:
    """Return a way to pin memory; load torch and start CUDA if necessary.

    Raises:
        OSError: torch is not installed, or it finds no GPU.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise OSError("host memory cannot be pinned: torch is not installed") from error
    if not torch.cuda.is_available():
        raise OSError("host memory cannot be pinned: torch finds no CUDA GPU in this process")
    return CudaPinning(torch)
