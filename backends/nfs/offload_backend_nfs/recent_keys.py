"""Bounded memories of keys: the most recent ones stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from offload_core.api import ObjectKey

T = TypeVar("T")


def remember(recent: dict[ObjectKey, T], keys: Iterable[ObjectKey], value: T) -> None:
    """Set the value of keys, and make them the most recent ones."""
    for key in keys:
        recent.pop(key, None)
        recent[key] = value


def drop_oldest(recent: dict[ObjectKey, T], most: int) -> None:
    """Forget the oldest keys beyond ``most``."""
    while len(recent) > most:
        del recent[next(iter(recent))]
