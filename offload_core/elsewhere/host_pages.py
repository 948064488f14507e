"""The pages of SGLang's host memory pools, as memory that objects are stored from and loaded into."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload_core.api.errors import ConfigError
from offload_core.elsewhere.host_copier import PlaceParts
from offload_core.objects.fingerprint import Json

_GEOMETRY = (
    "layout", "dtype", "page_size", "logical_page_size", "storage_format_tag", "dcp_size", "dcp_rank",
    "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "size_per_token", "dsa_kv_cache_store_fp8",
    "item_bytes", "slot_page_size", "state_page_bytes", "swa_page_size", "indexer_dtype", "indexer_page_stride_size",
    "num_mamba_layers", "conv_dtype", "temporal_dtype", "conv_state_shapes", "temporal_state_shape",
)  # fmt: skip
"""The attributes of pools that decide the meaning of a page's bytes. A pool has some of them."""


@dataclass(frozen=True)
class Page:
    """The memory of one page.

    Args:
        finish: takes a loaded page over into the pool; ``None`` if the memory is the pool's own.
    """

    parts: PlaceParts
    finish: Callable[[], None] | None = None


class HostPages:
    """The pages of one host pool.

    A page is moved in place if the pool tells the addresses of its buffers. Otherwise it is moved as a flat copy, which
    every pool can make and take.

    Args:
        name: SGLang's name of the pool.
        pool: SGLang's host pool.
        flat: move flat copies in any case.

    Raises:
        ConfigError: the pool gives its pages in neither way.
    """

    def __init__(self, name: str, pool: Any, *, flat: bool = False) -> None:
        self.name = name
        self._pool = pool
        self.indices_per_page = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", None) or 1)
        """Number of host indices of a page."""
        self._part_bytes: tuple[int, ...] = ()
        try:
            buffers = pool.get_page_buffer_meta(torch.zeros(self.indices_per_page, dtype=torch.int64))
        except Exception:  # each pool says in its own way that it does not tell addresses
            buffers, has_memory = None, True
        else:
            has_memory = buffers is not None or getattr(pool, "kv_buffer", True) is not None
        self.is_flat: bool = flat or buffers is None
        """True if pages are moved as flat copies."""
        if has_memory:
            self._part_bytes = (_flat_page_bytes(name, pool),) if self.is_flat else tuple(buffers[1])

    @property
    def is_logical(self) -> bool:
        """True if the pool has no memory: its pages are in other pools."""
        return not self._part_bytes

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return sum(self._part_bytes)

    @property
    def has_heads(self) -> bool:
        """True if the pool holds attention heads, which are split over the ranks."""
        return getattr(self._pool, "head_num", None) is not None

    def identity(self) -> dict[str, Json]:
        """Return the facts that decide a page's bytes."""
        facts: dict[str, Json] = {
            field: _plain(value) for field in _GEOMETRY if (value := getattr(self._pool, field, None)) is not None
        }
        return {
            "pool": self.name,
            "class": type(self._pool).__name__,
            "pages": "flat" if self.is_flat else "buffers",
            "part_bytes": list(self._part_bytes),
            "geometry": facts,
        }

    def stored(self, indices: Any, count: int) -> list[Page]:
        """Return the memory of pages that are to be stored.

        Args:
            indices: their host indices, those of each page in a row.
            count: number of pages.

        Raises:
            Exception: there is another number of indices, or the pool refuses them.
        """
        if not self.is_flat:
            return self._in_place(indices, count)
        return [
            Page((_bytes_of(self._pool.get_data_page(index, flat=True)),)) for index in self._starts(indices, count)
        ]

    def loaded(self, indices: Any, count: int) -> list[Page]:
        """Return the memory that pages are to be loaded into, as for :meth:`stored`."""
        if not self.is_flat:
            return self._in_place(indices, count)
        return [self._copy(index) for index in self._starts(indices, count)]

    def _copy(self, index: int) -> Page:
        flat = self._pool.get_dummy_flat_data_page()
        return Page((_bytes_of(flat),), lambda: self._pool.set_from_flat_data_page(index, flat))

    def _in_place(self, indices: Any, count: int) -> list[Page]:
        self._starts(indices, count)
        addresses, sizes = self._buffers(indices)
        if tuple(sizes) != self._part_bytes * count:
            raise ValueError(f"the pool {self.name!r} gives {count} pages in parts of {list(sizes)} bytes")
        parts = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        each = len(self._part_bytes)
        return [Page(tuple(parts[start : start + each])) for start in range(0, len(parts), each)]

    def _buffers(self, indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if not addresses or min(addresses) <= 0 or min(sizes) <= 0:
            raise ValueError(f"the pool {self.name!r} has no memory")
        return addresses, sizes

    def _starts(self, indices: Any, count: int) -> list[int]:
        """Return the first index of each page."""
        if indices is None or len(indices) != count * self.indices_per_page:
            raise ValueError(
                f"{count} pages of the pool {self.name!r} have {count * self.indices_per_page} host indices, "
                f"not {None if indices is None else len(indices)}"
            )
        return [int(index) for index in indices[:: self.indices_per_page]]


def _flat_page_bytes(name: str, pool: Any) -> int:
    try:
        return len(_bytes_of(pool.get_dummy_flat_data_page()))
    except Exception as error:
        raise ConfigError(
            [
                f"SGLang's host pool {name!r} ({type(pool).__name__}, layout {getattr(pool, 'layout', None)!r}) gives "
                f"no pages to a storage backend: {error}; start SGLang with --hicache-mem-layout page_first or "
                "page_first_direct, and with interface_v1 set to 1"
            ]
        ) from error


def tensor_page(tensor: Any) -> Page | None:
    """Return the memory of a tensor; ``None`` if it cannot be moved: it is on a device, or not in one piece."""
    try:
        return Page((_bytes_of(tensor),))
    except Exception:
        return None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory.

    Raises:
        ValueError: the tensor is on a device, not in one piece, or empty.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        raise ValueError(f"a tensor on {tensor.device} with the shape {tuple(tensor.shape)} has no bytes in one piece")
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _plain(value: Any) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
