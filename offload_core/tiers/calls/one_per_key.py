"""The check of a backend's results against clause C2 of the contract."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import TypeVar, get_args

from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey

T = TypeVar("T")

OutcomeTypes = type[enum.Enum] | UnionType
"""A type of outcomes, or that type and ``None``."""


def one_per_key(
    keys: Sequence[ObjectKey], results: Sequence[T], call: str, outcomes: OutcomeTypes | None = None
) -> list[T]:
    """Return the results of a call as a list.

    Args:
        call: the tier and the call, for the message.
        outcomes: the type of the results; by default any.

    Raises:
        BackendError: there is not one result per key, or one is no outcome.
    """
    if len(results) != len(keys):
        raise BackendError(
            f"{call} returned {len(results)} results for {len(keys)} keys; clause C2 asks for one per key, in order"
        )
    if outcomes is not None:
        for result in results:
            if not isinstance(result, outcomes):
                raise BackendError(f"{call} returned {result!r}; clause C2 asks for {_names(outcomes)} for each key")
    return list(results)


def _names(outcomes: OutcomeTypes) -> str:
    types = get_args(outcomes) if isinstance(outcomes, UnionType) else (outcomes,)
    names = [str(value) for one in types if one is not NoneType for value in one]
    return " or ".join([*names, *(["None"] if NoneType in types else [])])
