"""The addresses of buffers, to tell whether two of them are the same memory."""

from __future__ import annotations


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of ``view``, which may be read-only. That of an empty view means nothing."""
    import numpy as np  # the public door loads no large library

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
