"""Arguments and options that several commands share, and the quantities they are written in."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import durationpy
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

_BYTE_SIZE = TypeAdapter(ByteSize)


def size(text: str) -> ByteSize:
    """Read a number of bytes, for example ``100GiB``."""
    try:
        found = _BYTE_SIZE.validate_python(text)
    except ValidationError:
        found = ByteSize(-1)
    if found < 0:
        raise typer.BadParameter(f"{text!r} is not a size; write a number of bytes or a size such as 100GiB or 2MiB")
    return found


def duration(text: str) -> timedelta:
    """Read a duration, for example ``30d`` or ``1h30m``."""
    try:
        found = durationpy.from_str(text)
    except ValueError:
        found = timedelta(-1)
    if found < timedelta():
        raise typer.BadParameter(f"{text!r} is not a duration; write one such as 30d, 12h or 1h30m")
    return found


def fingerprint_prefix(text: str) -> str:
    """Read the first digits of a fingerprint."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", text.lower()):
        raise typer.BadParameter(f"{text!r} is not the start of a fingerprint; write 1 to 64 hexadecimal digits")
    return text.lower()


ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="the configuration file (YAML, TOML or JSON) that vLLM's config_file names; relative paths in it start "
        "from the current folder, as they do for the engine",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")]
TierNames = Annotated[
    list[str] | None, typer.Option("--tier", metavar="NAME", help="only this tier; may be given several times")
]
