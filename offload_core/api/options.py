"""Sizes and durations as operators write them, as field types for options. Public for plugin authors.

Both take a number or a string with a unit, and give a plain number, so that a default is a plain number too::

    class BoxOptions(BackendOptions):
        capacity: Bytes = Field(20 * 1024**3, ge=1, description="room for objects")
        retry_after: Seconds = Field(0.5, gt=0, description="wait before a failed connection is tried again")
"""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeGuard

import durationpy
from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

# Both libraries take more than they should: ByteSize reads "1,5GiB" as one byte, durationpy "1h-30m" as 90 minutes and
# "5mm" as five months. What they get to see is therefore checked first; the patterns are the JSON schema's as well.
_SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGTPEkmgtpe]([Ii]?[Bb])?|[Bb])$"
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h|d|w))+$"

SIZE_ERROR = "size_form"
DURATION_ERROR = "duration_form"

_byte_size = TypeAdapter(ByteSize)


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _to_bytes(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(_SIZE_PATTERN, value):
        try:
            return int(_byte_size.validate_python(value))
        except ValidationError:
            pass  # a number beyond what a float holds
    elif _is_finite_number(value) and value == int(value):
        return int(value)
    raise PydanticCustomError(SIZE_ERROR, "not a size; write a number of bytes or a size such as 20GiB or 512MiB")


def _to_seconds(value: object) -> float:
    try:
        if isinstance(value, str) and re.fullmatch(_DURATION_PATTERN, value):
            return float(durationpy.from_str(value).total_seconds())
        if _is_finite_number(value):
            return float(value)
    except (ValueError, OverflowError):
        pass  # a number beyond what a float or a timedelta holds
    raise PydanticCustomError(
        DURATION_ERROR,
        "not a duration; write a number of seconds, 0 or more, or a duration such as 500ms, 30s or 1m30s",
    )


Bytes = Annotated[
    int,
    BeforeValidator(_to_bytes),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_PATTERN}],
            "examples": ["512MiB", "20GiB", 1048576],
        }
    ),
]
"""A size in bytes, an ``int`` of at least 0: a whole number, or a string with a unit.

Units are B, KiB, MiB, GiB, TiB, PiB, EiB (powers of 1024) and KB, MB, … or K, M, … (powers of 1000), in any case.
"""

Seconds = Annotated[
    float,
    BeforeValidator(_to_seconds),
    WithJsonSchema(
        {
            "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION_PATTERN}],
            "examples": ["30s", "500ms", "1m30s", "2h", 0.5],
        }
    ),
]
"""A duration in seconds, a finite ``float`` of at least 0: a number of seconds, or a string such as ``1m30s``.

Units are us, ms, s, m (minutes), h, d and w; the parts are added up, to the microsecond.
"""
