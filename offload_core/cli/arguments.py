"""The arguments and options that several commands share, and the parsers of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from offload_core.api.options import Bytes, Seconds

_BYTES: TypeAdapter[int] = TypeAdapter(Bytes)
_SECONDS: TypeAdapter[float] = TypeAdapter(Seconds)


def size(text: str | int) -> int:
    """Parse a number of bytes, for example ``100GiB``. Typer passes the default of an option here too, as a number."""
    try:
        return _BYTES.validate_python(int(text) if str(text).isdecimal() else text)
    except ValidationError:
        raise typer.BadParameter(
            f"{text!r} is not a size; write a number of bytes or a size such as 100GiB or 2MiB"
        ) from None


def duration_seconds(text: str) -> float:
    """Parse a duration, for example ``30d`` or ``1h30m``."""
    try:
        return _SECONDS.validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a duration; write one such as 30d, 12h or 1h30m") from None


def fingerprint_prefix(text: str) -> str:
    """Parse the first digits of a fingerprint."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", text.lower()):
        raise typer.BadParameter(f"{text!r} is not the start of a fingerprint; write 1 to 64 hexadecimal digits")
    return text.lower()


ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="the configuration file (YAML, TOML or JSON) that vLLM's config_file names; its relative paths start at "
        "the current folder, as they do for the engine",
    ),
]
MetricsSource = Annotated[
    str,
    typer.Argument(
        metavar="METRICS",
        help="the address of a running vLLM, such as http://localhost:8000/metrics, a file with its answer, or - for "
        "the standard input",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")]
TierNames = Annotated[
    list[str] | None, typer.Option("--tier", metavar="NAME", help="only this tier; repeat the option for several tiers")
]
