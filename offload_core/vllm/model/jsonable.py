"""vLLM's configuration values as JSON, for the identity of an engine."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from offload_core.objects.fingerprint import Json


def jsonable(value: Any) -> Json:
    """Return ``value`` as JSON; an unsupported value becomes the name of its type, never an address."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):  # their order may differ between processes
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return type(value).__qualname__
