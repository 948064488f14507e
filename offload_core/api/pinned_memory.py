"""Page-locked host memory: a GPU copies to and from it at full speed, and the system never swaps it out.

CUDA is reached through torch, which is imported only where pinning is demanded: a process in which nobody has loaded
torch does not work on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every GPU of the process, not for the current one only."""


class HostPinning(Protocol):
    """Pins memory of this process. Both calls may take seconds for large memory, and may run on any thread."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin ``nbytes`` bytes from ``address`` on, both multiples of the system's pages.

        Raises:
            OSError: they cannot be pinned.
        """

    def unregister(self, address: int) -> None:
        """Let go of what was registered at ``address``, before its memory is. Raises ``OSError`` when it fails."""


class CudaPinning:
    """Pins by CUDA, for the GPU that is current on the thread that constructs this.

    Args:
        torch: the module.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        # The current GPU is each thread's own: another thread would otherwise take up memory on the first one.
        self._device = self._cuda.current_device()

    def register(self, address: int, nbytes: int) -> None:
        """See :meth:`HostPinning.register`."""
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            raise OSError(
                f"CUDA could not pin {nbytes} bytes of host memory: cudaHostRegister returned error {code}; ask for "
                "less, or raise the limit on locked memory (ulimit -l, or the container's)"
            )

    def unregister(self, address: int) -> None:
        """See :meth:`HostPinning.unregister`."""
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostUnregister(address))
        if code:
            raise OSError(f"CUDA could not unpin the host memory at {address:#x}: cudaHostUnregister returned {code}")


def pinning_in_use() -> CudaPinning | None:
    """Return how to pin where this process works on a GPU by now, else ``None``. Loads and starts nothing.

    Call it on the thread that has chosen the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return CudaPinning(torch)


def demand_pinning() -> CudaPinning:
    """Return how to pin, loading torch and starting CUDA where nobody has.

    Raises:
        OSError: there is no torch, or it finds no GPU.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise OSError("host memory cannot be pinned: torch is not installed") from error
    if not torch.cuda.is_available():
        raise OSError("host memory cannot be pinned: torch finds no CUDA GPU in this process")
    return CudaPinning(torch)
