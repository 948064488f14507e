"""Mooncake's own client, for objects and transfers that the backend would never make."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from offload_backend_mooncake.addresses import free_port
from offload_backend_mooncake.library import Deadlines, import_mooncake

Bytes = NDArray[np.uint8]

DEADLINES = {"request_timeout_seconds": 2, "connect_timeout_seconds": 1, "transfer_timeout_seconds": 1}
"""The same in all tests, because Mooncake has one set of timeouts per process."""


class RawClient:
    """A client of its own, without the backend's care. Use it as a context manager."""

    def __init__(self, master: str) -> None:
        deadlines = Deadlines(*(float(seconds) for seconds in DEADLINES.values()))
        self.store: Any = import_mooncake(deadlines, "tcp", "raw").MooncakeDistributedStore()
        own = f"127.0.0.1:{free_port('127.0.0.1')}"
        code = self.store.setup(own, "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", master)
        assert code == 0, f"no connection to {master}: {code}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.store.close()

    def put(self, names: Sequence[str], arrays: Sequence[Bytes]) -> list[int]:
        return self._move(self.store.batch_put_from_multi_buffers, names, arrays)

    def get(self, names: Sequence[str], arrays: Sequence[Bytes]) -> list[int]:
        return self._move(self.store.batch_get_into_multi_buffers, names, arrays)

    def read(self, name: str) -> Bytes:
        """Return a whole object, head included."""
        array = np.zeros(self.store.get_size(name), np.uint8)
        assert self.get([name], [array]) == [len(array)]
        return array

    def replace(self, name: str, array: Bytes) -> None:
        """Put other bytes under a name."""
        assert self.store.batch_remove([name], True) == [0]
        assert self.put([name], [array]) == [0]

    def cut_short(self, name: str, nbytes: int) -> None:
        """Leave the first bytes of an object only."""
        self.replace(name, self.read(name)[:nbytes].copy())

    @staticmethod
    def _move(call: Any, names: Sequence[str], arrays: Sequence[Bytes]) -> list[int]:
        return list(call(list(names), [[array.ctypes.data] for array in arrays], [[array.nbytes] for array in arrays]))
