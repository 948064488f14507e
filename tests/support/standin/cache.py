"""One rank's KV cache, allocated by vLLM's own function; each layer addresses it by token position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.support.standin.content import ASLEEP, POISON, Prefix, content, layer_seed
from tests.support.standin.mirror import mirrors

NULL_BLOCK = 0

Positions = npt.NDArray[np.int64]


class WrongBytesError(AssertionError):
    """The KV cache does not hold the bytes that a forward pass must read there."""


@dataclass(frozen=True)
class Layer:
    """One layer's cache: ``pages`` has shape ``(rows, heads, states per row, bytes per state)``."""

    name: str
    group: int
    spec: KVCacheSpec
    seed: int
    rows_per_block: int
    pages: npt.NDArray[np.uint8]

    @property
    def state_tokens(self) -> int:
        """Tokens that one stored state covers."""
        return int(getattr(self.spec, "tokens_per_state", 1))

    def first_attended(self, position: int) -> int:
        """Return the first position that the query at ``position`` reads, by vLLM's definition of the spec."""
        if isinstance(self.spec, SlidingWindowSpec):
            return max(0, position - int(self.spec.sliding_window) + 1)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            chunk = int(self.spec.attention_chunk_size)
            return position // chunk * chunk
        return 0

    def states(self, start: int, end: int) -> Positions:
        """Return the states that lie wholly in positions ``start`` to ``end - 1``."""
        return np.arange(-(-start // self.state_tokens), end // self.state_tokens, dtype=np.int64)

    def expected(self, prefix: Prefix, states: Positions) -> npt.NDArray[np.uint8]:
        """Return the bytes of the states, shape ``(states, heads, bytes per state)``."""
        heads, width = self.pages.shape[1], self.pages.shape[3]
        hashes = prefix.hashes((states + 1) * self.state_tokens)
        return content(hashes, self.seed, heads * width).reshape(len(states), heads, width)

    def write(self, prefix: Prefix, table: Sequence[int], states: Positions) -> None:
        """Write the states into the blocks that ``table`` names."""
        blocks, rows, slots = self._slots(table, states)
        if (blocks == NULL_BLOCK).any():
            position = int(states[blocks == NULL_BLOCK][0]) * self.state_tokens
            raise WrongBytesError(f"layer {self.name}, group {self.group}: position {position} has no block to write")
        self.pages[rows, :, slots, :] = self.expected(prefix, states)

    def check(self, prefix: Prefix, table: Sequence[int], states: Positions, why: str) -> None:
        """Raise :class:`WrongBytesError` unless the blocks hold the states' bytes."""
        if not len(states):
            return
        blocks, rows, slots = self._slots(table, states)
        good = (self.pages[rows, :, slots, :] == self.expected(prefix, states)).all(axis=(1, 2)) & (
            blocks != NULL_BLOCK
        )
        if not good.all():
            bad = np.flatnonzero(~good)
            first = bad[0]
            found = self.pages[rows[first], :, slots[first], :]
            kind = "the null block" if blocks[first] == NULL_BLOCK else _kind(found)
            raise WrongBytesError(
                f"{why}: layer {self.name}, group {self.group}: {len(bad)} of {len(states)} states are wrong, from "
                f"position {int(states[first]) * self.state_tokens} to {int(states[bad[-1]]) * self.state_tokens}; the "
                f"first, in block {int(blocks[first])}, holds {kind}"
            )

    def check_state(self, prefix: Prefix, block: int, tokens: int, why: str) -> None:
        """Raise unless ``block`` holds the recurrent state after ``tokens`` tokens."""
        found = self.pages[block].reshape(-1)
        if block == NULL_BLOCK or not np.array_equal(found, self._state(prefix, tokens)):
            kind = "the null block" if block == NULL_BLOCK else f"block {block}, which holds {_kind(found)}"
            raise WrongBytesError(
                f"{why}: layer {self.name}, group {self.group}: the state after {tokens} tokens is not in {kind}"
            )

    def write_state(self, prefix: Prefix, block: int, tokens: int) -> None:
        """Write the recurrent state after ``tokens`` tokens into ``block``."""
        if block == NULL_BLOCK:
            raise WrongBytesError(
                f"layer {self.name}, group {self.group}: no block for the state after {tokens} tokens"
            )
        self.pages[block] = self._state(prefix, tokens).reshape(self.pages.shape[1:])

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another."""
        self.pages[self._rows(target)] = self.pages[self._rows(source)]

    def poison(self, block: int) -> None:
        """Overwrite the block with a pattern."""
        self.pages[self._rows(block)] = POISON

    def _rows(self, block: int) -> slice:
        return slice(block * self.rows_per_block, (block + 1) * self.rows_per_block)

    def _state(self, prefix: Prefix, tokens: int) -> npt.NDArray[np.uint8]:
        nbytes = int(np.prod(self.pages.shape[1:]))
        return content(np.array([prefix.hash_at(tokens)], dtype=np.uint64), self.seed, nbytes).reshape(nbytes)

    def _slots(self, table: Sequence[int], states: Positions) -> tuple[Positions, Positions, Positions]:
        states_per_block = self.spec.block_size // self.state_tokens
        states_per_row = states_per_block // self.rows_per_block
        index, slot = np.divmod(states, states_per_block)
        if len(index) and index[-1] >= len(table):
            raise WrongBytesError(
                f"layer {self.name}, group {self.group}: the table of {len(table)} blocks is too short"
            )
        blocks = np.array(table, dtype=np.int64)[index]
        rows, slots = np.divmod(slot, states_per_row)
        return blocks, blocks * self.rows_per_block + rows, slots


class RankCache:
    """One rank's tensors as vLLM's worker allocates them, and its layers by group."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        layout: str,
        rank: int,
        kernel_blocks: Sequence[int] | None,
        device: str = "cpu",
    ) -> None:
        self._config = kv_cache_config
        self._layout = layout
        self._rank = rank
        self._kernel_blocks = kernel_blocks
        self.tensors = self._allocated(device)
        in_host_memory = self.tensors if device == "cpu" else self._allocated("cpu")
        self._mirrors = [] if device == "cpu" else mirrors(in_host_memory, self.tensors)
        self._asleep: list[torch.Tensor] = []
        self._use(in_host_memory)

    def _allocated(self, device: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = allocate_kv_cache(
            self._config,
            torch.device(device),
            KVCacheLayout[self._layout],
            kernel_block_sizes=list(self._kernel_blocks) if self._kernel_blocks else None,
        )
        return tensors

    def _use(self, tensors: dict[str, torch.Tensor]) -> None:
        """Let the layers use these tensors, whose content is undefined."""
        self.layers: list[list[Layer]] = []
        for index, group in enumerate(self._config.kv_cache_groups):
            self.layers.append([])
            for name in group.layer_names:
                pages = tensors[name].view(torch.uint8).numpy()
                ratio = pages.shape[0] // self._config.num_blocks
                spec = _layer_spec(group.kv_cache_spec, name)
                self.layers[-1].append(Layer(name, index, spec, layer_seed(name, self._rank), ratio, pages))
        with self.in_host_memory():
            self.poison(range(self._config.num_blocks))

    def sleep(self) -> None:
        """Take the memory away from the tensors. It is poisoned, so that every later use of it shows."""
        self._asleep = [_memory(tensor) for tensor in self.tensors.values()]
        for memory in self._asleep:
            memory.fill_(ASLEEP)

    def wake_up(self, *, moved: bool) -> None:
        """Give the tensors memory again, with undefined content.

        Args:
            moved: give the layers new tensors, in the registered mapping. Otherwise they have the memory at the same
                addresses, as with vLLM's own allocator.

        Raises:
            WrongBytesError: somebody has written to the memory that was gone.
        """
        if any((memory != ASLEEP).any() for memory in self._asleep):
            raise WrongBytesError("somebody has written to the KV cache while its memory was gone")
        if moved:
            self.tensors.update(self._allocated("cpu"))
        self._use(self.tensors)

    @contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Let the block read and write pages of the device as host memory, in the place of kernels."""
        for mirror in self._mirrors:
            mirror.read()
        yield
        for mirror in self._mirrors:
            mirror.write()

    def all_layers(self) -> Iterator[Layer]:
        """Yield the layers of all groups."""
        for layers in self.layers:
            yield from layers

    def poison(self, blocks: Iterable[int]) -> None:
        """Overwrite the blocks of all groups with a pattern."""
        for block in blocks:
            for layer in self.all_layers():
                layer.poison(block)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, in order, in every layer's pages."""
        for source, target in copies:
            for layer in self.all_layers():
                layer.copy_block(source, target)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the allocation of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def is_recurrent(layer: Layer) -> bool:
    """Return whether the layer holds one state per block rather than one per token."""
    return isinstance(layer.spec, MambaSpec)


def _layer_spec(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    inner = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    assert isinstance(inner, AttentionSpec | MambaSpec), type(inner)
    return inner


def _kind(found: npt.NDArray[np.uint8]) -> str:
    kinds = {POISON: "poison", ASLEEP: "bytes of memory that is asleep"}
    return kinds.get(int(found.flat[0]), "other bytes") if (found == found.flat[0]).all() else "other bytes"
