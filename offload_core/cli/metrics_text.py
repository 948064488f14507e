"""Samples of metrics in the text format of Prometheus, read from an engine's address or a file."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import typer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from offload_core.api.errors import ConfigError
from offload_core.cli.output import note, print_json
from offload_core.cli.session import EXIT_USAGE

_PREFIX = "vllm:hybrid_offload_"
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 64 << 20


def read_samples(source: str) -> list[Sample]:
    """Read metrics.

    Args:
        source: an address (``http://host:8000/metrics``; without a path, ``/metrics`` is meant), a file, or ``-`` for
            the standard input.

    Raises:
        ConfigError: the source cannot be read, or holds no metrics.
    """
    try:
        text = _text(source)
    except urllib.error.HTTPError as error:  # the server has answered, with a number that tells more than its reason
        raise ConfigError([f"cannot be read: {error}; {_CURE}"], source) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError([f"cannot be read: {reason}; {_CURE}"], source) from None
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        reason = "there is no sample"
    except ValueError as error:
        samples, reason = [], str(error)
    if not samples:
        raise ConfigError([f"has no metrics in the text format of Prometheus ({reason}); {_CURE}"], source)
    return samples


def read_or_exit(source: str, *, as_json: bool) -> list[Sample]:
    """Read metrics for a command, as :func:`read_samples` does.

    Raises:
        typer.Exit: they cannot be read; the problem has been printed.
    """
    try:
        return read_samples(source)
    except ConfigError as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(error.problems)})
        raise typer.Exit(EXIT_USAGE) from None


def by_tier(samples: Iterable[Sample]) -> dict[tuple[str, str], dict[str, float]]:
    """Return our metrics by engine and tier, under their names without the common beginning; buckets are left out.

    The engine's name is empty if the metrics show none.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, labels, value, *_ in samples:
        if name.startswith(_PREFIX) and "tier" in labels and "le" not in labels:
            place = labels.get("engine", ""), labels["tier"]
            found.setdefault(place, {})[name.removeprefix(_PREFIX)] = value
    return dict(sorted(found.items()))


_CURE = "give the address of a running vLLM, such as http://localhost:8000/metrics, a file with its answer, or -"


def _text(source: str) -> str:
    if source == "-":
        return sys.stdin.read(_MAX_BYTES)
    if "://" not in source:
        with Path(source).open(encoding="utf-8") as file:
            return file.read(_MAX_BYTES)
    parts = urlsplit(source)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{parts.scheme}:// is not supported; only http:// and https:// are")
    address = source if parts.path.strip("/") else parts._replace(path="/metrics").geturl()
    with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
        content: bytes = answer.read(_MAX_BYTES)
    return content.decode()
