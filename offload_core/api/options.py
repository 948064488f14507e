"""The base class of a backend's options, the field types for sizes, durations and folders, and a check of folders.

Sizes and durations accept a number or a string with a unit, and give a plain number. A default is a plain number too::

    class BoxOptions(BackendOptions):
        capacity: Bytes = Field(20 * 1024**3, ge=1, description="capacity for objects")
        retry_after: Seconds = Field(0.5, gt=0, description="wait before a failed connection is tried again")
"""

from __future__ import annotations

import math
import os
import re
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import durationpy
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


class BackendOptions(BaseModel):
    """Base class of a backend's options. It refuses unknown keys, and its instances are immutable.

    Give every field a ``description``, which becomes part of the JSON schema. Make a secret a ``pydantic.SecretStr``:
    the core fills it from an environment variable only (C15). A ``Literal`` with the word ``on`` or ``off`` takes a
    boolean too, because YAML reads these words as booleans where they have no quotes. It may be part of a union.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    credentials_cure: ClassVar[str] = "give it in the environment, or in the configuration of the storage's own library"
    """Advice to an operator whose configuration holds a credential, which the core refuses."""

    @model_validator(mode="before")
    @classmethod
    def _words_for_booleans(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        with_words = [name for name, field in cls.model_fields.items() if _words_of(field.annotation)]
        words = {given: word for word, given in _BOOLEANS.items()}
        return given | {name: words[given[name]] for name in with_words if isinstance(given.get(name), bool)}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        options = handler.resolve_ref_schema(schema).get("properties", {})
        for name in options.keys() & cls.model_fields.keys():
            words = _words_of(cls.model_fields[name].annotation)
            for part in (options[name], *options[name].get("anyOf", ())):
                choices = part.get("enum", [part["const"]] if "const" in part else [])
                if booleans := [_BOOLEANS[word] for word in choices if word in words]:
                    part["enum"] = [*choices, *booleans]
                    part.pop("const", None)
                    part.pop("type", None)
        return schema


_BOOLEANS = {"on": True, "off": False}
"""The words that YAML reads as booleans, and that options use."""


def _words_of(annotation: Any) -> set[str]:
    """Return the words of an option that YAML reads as booleans; none if it takes booleans too."""
    accepted = _accepted(annotation)
    if bool in accepted or any(isinstance(one, bool) for one in accepted):
        return set()
    return {one for one in accepted if isinstance(one, str) and one in _BOOLEANS}


def _accepted(annotation: Any) -> list[Any]:
    """Return the values of all ``Literal`` in an annotation, and the other types of its union."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(inner)
    if origin in (Union, UnionType, Annotated):
        return [one for part in (inner[:1] if origin is Annotated else inner) for one in _accepted(part)]
    return [annotation]


OptionsT = TypeVar("OptionsT", bound=BackendOptions)

# Both libraries accept too much: ByteSize reads "1,5GiB" as one byte, and durationpy reads "1h-30m" as 90 minutes and
# "5mm" as five months. These patterns therefore check each text first. The JSON schema shows them too.
_SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGTPEkmgtpe]([Ii]?[Bb])?|[Bb])$"
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h|d|w))+$"

SIZE_ERROR = "size_form"
DURATION_ERROR = "duration_form"

# Databases hold sizes in 64 bits and add them up; no clock or lock waits for much longer than these seconds.
MAX_BYTES = 1024**6
MAX_SECONDS = 10 * 365 * 86_400.0

_byte_size = TypeAdapter(ByteSize)


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _to_bytes(value: object) -> int:
    nbytes: int | None = None
    if isinstance(value, str) and re.fullmatch(_SIZE_PATTERN, value):
        try:
            nbytes = int(_byte_size.validate_python(value))
        except ValidationError:  # a number too large for a float
            nbytes = MAX_BYTES + 1
    elif _is_finite_number(value) and value == int(value):
        nbytes = int(value)
    if nbytes is None:
        raise PydanticCustomError(SIZE_ERROR, "not a size; write a number of bytes or a size such as 20GiB or 512MiB")
    if nbytes > MAX_BYTES:
        raise PydanticCustomError(SIZE_ERROR, "too large; write a size of at most 1EiB")
    return nbytes


def _to_seconds(value: object) -> float:
    seconds: float | None = None
    try:
        if isinstance(value, str) and re.fullmatch(_DURATION_PATTERN, value):
            seconds = float(durationpy.from_str(value).total_seconds())
        elif _is_finite_number(value):
            seconds = float(value)
    except (ValueError, OverflowError):  # a number too large for a float or a timedelta
        seconds = math.inf
    if seconds is None:
        raise PydanticCustomError(
            DURATION_ERROR,
            "not a duration; write a number of seconds, 0 or more, or a duration such as 500ms, 30s or 1m30s",
        )
    if seconds > MAX_SECONDS:
        raise PydanticCustomError(DURATION_ERROR, "too long; write a duration of at most 3650d, which is ten years")
    return seconds


def _to_folder(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the path is empty, which would be the working folder; name a folder")
    return value


def _to_absolute(folder: Path) -> Path:
    try:
        return folder.expanduser().absolute()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~user names no user of this machine
        raise ValueError(f"{error}; name a folder that this process may use") from error


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
"""A size in bytes, an ``int`` from 0 to 1 EiB. Users write a whole number, or a string with a unit.

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
"""A duration in seconds, a ``float`` from 0 to ten years. Users write a number, or a string such as ``1m30s``.

Units are us, ms, s, m (minutes), h, d and w. The parts are added up, to the microsecond.
"""

Folder = Annotated[Path, BeforeValidator(_to_folder), AfterValidator(_to_absolute)]
"""An absolute path of a folder. Users may write a relative one, or ``~`` for the home folder, but not nothing."""

_FOLDER_CHECK_SECONDS = 2.0


def check_folder(folder: Path, cure: str) -> None:
    """Refuse a folder that cannot be used: the root, a file, or a folder that is missing together with its parent.

    Call it in a validator of the options. A file system that does not answer within two seconds is no error here: the
    tier opens the folder later, under a deadline.

    Args:
        folder: the folder that the operator named.
        cure: the advice for the operator if the parent is missing.

    Raises:
        ValueError: with the folder, the problem and the cure.
    """
    if os.path.normpath(folder) in ("/", "//"):
        raise ValueError(f"{folder} is the root of all file systems; name a folder for the objects alone")
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
