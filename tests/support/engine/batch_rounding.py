"""A processor on which bfloat16 rounding depends on the batch, on any processor.

Matrix units such as Intel's AMX add up a product in another order for another number of rows. A request's outputs
then depend on the requests that the engine computes beside it, without any connector. A run that names
:func:`rounding_by_batch` as ``around_workloads`` rounds so on every processor.

Every linear layer adds two products of bfloat16, of the first columns of its input and of the rest. The number of rows
decides where the columns are parted. The same rows in a batch of the same size give the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tests.support.workload import Workload

_PARTS = 13  # a prime: batches of one block of tokens and of several blocks are parted at different columns


@contextlib.contextmanager
def rounding_by_batch(workload: Workload, drain: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Round by the number of rows while the workload runs; the notes tell how many products were parted."""
    notes = {"parted products": 0}
    with contextlib.ExitStack() as patches:
        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            patches.enter_context(mock.patch.object(method, "apply", _parted(method.apply, notes)))
        yield notes


def _parted(apply: Callable[..., torch.Tensor], notes: dict[str, int]) -> Callable[..., torch.Tensor]:
    def apply_in_parts(
        method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        columns = x.shape[-1] * (x.shape[0] % _PARTS) // _PARTS
        if x.dtype != torch.bfloat16 or columns == 0:
            return apply(method, layer, x, bias)
        notes["parted products"] += 1
        first, rest = x.clone(), x.clone()
        first[..., columns:] = 0
        rest[..., :columns] = 0
        return apply(method, layer, first, bias) + apply(method, layer, rest, None)

    return apply_in_parts
