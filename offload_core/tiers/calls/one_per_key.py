"""The check of a backend's results against clause C2 of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from offload_core.api.checks.answers import answer_problem
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey

T = TypeVar("T")


def one_per_key(
    keys: Sequence[ObjectKey], results: Sequence[T], call: str, kind: type, *, or_none: bool = False
) -> list[T]:
    """Return the results of a call as a list.

    Args:
        call: the call, for the message.
        kind: the type of each result; see :func:`answer_problem`.
        or_none: a result may also be ``None``.

    Raises:
        BackendError: there is not one result per key, or one has another type.
    """
    if problem := answer_problem(call, results, kind, or_none=or_none):
        raise BackendError(problem)
    if len(results) != len(keys):
        raise BackendError(
            f"{call} returned {len(results)} results for {len(keys)} keys; clause C2 requires one per key, in order"
        )
    return list(results)
