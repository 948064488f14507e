"""The base class of a backend's options, the field types for sizes and durations, and a check of folders.

Both field types accept a number or a string with a unit, and give a plain number. A default is a plain number too::

    class BoxOptions(BackendOptions):
        capacity: Bytes = Field(20 * 1024**3, ge=1, description="capacity for objects")
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
    """Base class of a backend's options. It refuses unknown keys, and its instances are immutable.

    Give every field a ``description``, which becomes part of the JSON schema. Make a secret a ``pydantic.SecretStr``:
    the core fills it from an environment variable only (C15).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


OptionsT = TypeVar("OptionsT", bound=BackendOptions)

# Both libraries accept too much: ByteSize reads "1,5GiB" as one byte, and durationpy reads "1h-30m" as 90 minutes and
# "5mm" as five months. These patterns therefore check each text first. The JSON schema shows them too.
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
            pass  # a number too large for a float
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
        pass  # a number too large for a float or a timedelta
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
"""A size in bytes, an ``int`` of at least 0. Users write a whole number, or a string with a unit.

Units are B, KiB, MiB, GiB, TiB, PiB, EiB (powers of 1024) and KB, MB, … or K, M, … (powers of 1000). Their case does
not matter.
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
"""A duration in seconds, a finite ``float`` of at least 0. Users write a number, or a string such as ``1m30s``.

Units are us, ms, s, m (minutes), h, d and w. The parts are added up, to the microsecond.
"""

_FOLDER_CHECK_SECONDS = 2.0


def check_folder(folder: Path, cure: str) -> None:
    """Refuse a folder that cannot be used: its name is that of a file, or it and its parent are missing.

    Call it in a validator of the options. A file system that does not answer within two seconds is no error here: the
    tier opens the folder later, under a deadline.

    Args:
        folder: the folder that the operator named.
        cure: the advice for the operator if the parent is missing.

    Raises:
        ValueError: with the folder, the problem and the cure.
    """
    answer: Future[tuple[bool, bool, bool]] = Future()

    def inspect_folder() -> None:
        try:
            answer.set_result((folder.exists(), folder.is_dir(), folder.parent.is_dir()))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=inspect_folder, name=f"check of {folder}", daemon=True).start()
    wait([answer], timeout=_FOLDER_CHECK_SECONDS)
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
