"""The base class of a backend's options, field types for sizes and durations, and a check of folders.

Both field types take a number or a string with a unit, and give a plain number, so a default is a plain number too::

    class BoxOptions(BackendOptions):
        capacity: Bytes = Field(20 * 1024**3, ge=1, description="room for objects")
        retry_after: Seconds = Field(0.5, gt=0, description="wait before a failed connection is tried again")
"""

from __future__ import annotations

import math
import re
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Annotated, TypeGuard, TypeVar

import durationpy
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError


class BackendOptions(BaseModel):
    """Base of a backend's options. Unknown keys are refused; give every field a ``description``."""

    model_config = ConfigDict(extra="forbid", frozen=True)


OptionsT = TypeVar("OptionsT", bound=BackendOptions)

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

_LOOK_SECONDS = 2.0


def check_folder(folder: Path, cure: str) -> None:
    """Refuse a folder that cannot be used: something else has its name, or it is not there and nor is its parent.

    One whose file system does not answer soon is let pass: it hangs, which is seen again, under a deadline, when the
    tier is opened.

    Args:
        cure: what to do where the parent is missing.

    Raises:
        ValueError: with the folder, what is wrong with it, and the cure.
    """
    answer: Future[tuple[bool, bool, bool]] = Future()

    def look() -> None:
        try:
            answer.set_result((folder.exists(), folder.is_dir(), folder.parent.is_dir()))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=look, name=f"look at {folder}", daemon=True).start()
    wait([answer], timeout=_LOOK_SECONDS)
    if not answer.done():
        return
    try:
        exists, is_folder, has_parent = answer.result()
    except OSError as error:
        raise ValueError(f"{error}; name a folder that this process may use") from error
    if exists and not is_folder:
        raise ValueError(f"{folder} is a file; name a folder")
    if not exists and not has_parent:
        raise ValueError(f"the parent folder {folder.parent} does not exist; {cure}")
