"""Samples of metrics in the text format of Prometheus, read from an engine's address or a file."""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from offload_core.api.errors import ConfigError

_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 64 << 20
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


def read_samples(source: str) -> list[Sample]:
    """Read metrics.

    Args:
        source: an address (``http://host:8000/metrics``; without a path, ``/metrics`` is meant), a file, or ``-`` for
            the standard input.

    Raises:
        ConfigError: the source cannot be read, or holds no metrics.
    """
    try:
        samples = list(_parsed(_text(source)))
    except urllib.error.HTTPError as error:  # the server has answered, with a number that tells more than its reason
        raise ConfigError([f"cannot be read: {error}; {_CURE}"], source) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError([f"cannot be read: {reason}; {_CURE}"], source) from None
    if not samples:
        raise ConfigError([f"has no metrics in the text format of Prometheus; {_CURE}"], source)
    return samples


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


def _parsed(text: str) -> Iterator[Sample]:
    """Yield the samples; comments and all other lines are passed over."""
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {name: _unescaped(written) for name, written in _LABEL.findall(found["labels"] or "")}
        yield Sample(found["name"], labels, value)


def _unescaped(written: str) -> str:
    return _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], written)
