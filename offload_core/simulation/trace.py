"""Traces: the prompts that an engine received, without their content.

A trace is a file of JSON lines, plain or compressed (``.gz``). A line is one request in the layout of Mooncake's
traces::

    {"timestamp": 3052, "input_length": 700, "output_length": 12, "hash_ids": [0, 17]}

Each of ``hash_ids`` stands for a block of tokens of the prompt and for all tokens before it. Two prompts have an id in
common only if they agree up to the end of that block. The last id may stand for a part of a block.

The layout does not hold the number of tokens per block. A *header* as the first line tells it::

    {"format": "offload-core trace", "version": 1, "block_tokens": 256}

An engine writes a line when the request has ended. So behind a header, the requests are put in the order of
``timestamp``, their arrival in milliseconds. Other keys are ignored.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import NamedTuple, TextIO

from offload_core.api.errors import ConfigError

FORMAT = "offload-core trace"
VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per id in the traces that Mooncake has published."""
MAX_LINE_CHARACTERS = 16 << 20
"""The longest line: a request of millions of ids."""
MAX_PROBLEMS = 10
"""Problems that one error reports."""


class Request(NamedTuple):
    """One request of a trace."""

    input_tokens: int
    ids: tuple[int, ...]
    """Of the blocks of the prompt, in order."""

    def named_tokens(self, block_tokens: int) -> int:
        """Return the tokens in whole blocks. The id of a part of a block stands for one prompt, not for a prefix."""
        return self.input_tokens - self.input_tokens % block_tokens

    def loadable_tokens(self, block_tokens: int) -> int:
        """Return the tokens in whole blocks without the last token of the prompt, which is always computed."""
        return min(self.named_tokens(block_tokens), self.input_tokens - 1)


class Trace(NamedTuple):
    """The requests of a trace, in the order of their arrival."""

    block_tokens: int
    """Tokens per id."""
    requests: list[Request]

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)


class _BadLineError(ValueError):
    """A line that is no request."""


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a trace.

    Args:
        block_tokens: tokens per id. By default the header's number, or 512 without a header.

    Raises:
        ConfigError: with the first problems: the number of the line, the bad value, good values.
    """
    source = f"{path} (trace)"
    try:
        with _open(path) as lines:
            return _read(lines, block_tokens, source)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError([f"cannot be read: {error}"], source) from None
    except UnicodeDecodeError:
        raise ConfigError(["is not text; a trace is a file of JSON lines, or such a file as .gz"], source) from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read(lines: TextIO, block_tokens: int | None, source: str) -> Trace:
    problems: list[str] = []
    requests: list[Request] = []
    arrivals_ms: list[int] = []
    header: int | None = None
    predecessors = _Predecessors()
    for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_CHARACTERS + 1), ""), 1):
        if len(line) > MAX_LINE_CHARACTERS:
            problems.append(f"line {number}: longer than 16 MiB, so it is no request; later lines were not read")
            break
        if not line.strip():
            continue
        try:
            content = _object(line)
            if number == 1 and "format" in content:
                header = _header_block_tokens(content, block_tokens)
                continue
            if "format" in content and "input_length" not in content:
                raise _BadLineError(
                    "a header in the middle: the ids of two files have nothing in common; simulate each file alone"
                )
            request = _request(content, block_tokens or header or MOONCAKE_BLOCK_TOKENS)
            predecessors.check(request.ids)
            requests.append(request)
            in_order = header is None or "timestamp" not in content
            arrivals_ms.append(0 if in_order else _integer(content, "timestamp", 0))
        except _BadLineError as error:
            problems.append(f"line {number}: {error}")
            if len(problems) == MAX_PROBLEMS:
                problems.append("later lines were not read")
                break
    if not problems and not requests:
        problems.append("it has no request; write one JSON object per line")
    if problems:
        raise ConfigError(problems, source)
    if header is not None:
        requests = [requests[place] for place in sorted(range(len(requests)), key=arrivals_ms.__getitem__)]
    return Trace(block_tokens or header or MOONCAKE_BLOCK_TOKENS, requests)


def _object(line: str) -> dict[str, object]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"no JSON: {error}") from None
    if not isinstance(content, dict):
        raise _BadLineError("not a JSON object; write one with input_length and hash_ids")
    return content


def _header_block_tokens(content: dict[str, object], wanted: int | None) -> int:
    if content["format"] != FORMAT:
        raise _BadLineError(f"format: {content['format']!r} is not known; the only format is {FORMAT!r}")
    if content.get("version") != VERSION:
        raise _BadLineError(f"version: {content.get('version')!r} is not known; this release reads version {VERSION}")
    block_tokens = _integer(content, "block_tokens", 1)
    if wanted not in (None, block_tokens):
        raise _BadLineError(f"block_tokens: {block_tokens}, but {wanted} was asked for; leave the option out")
    return block_tokens


def _request(content: dict[str, object], block_tokens: int) -> Request:
    input_tokens = _integer(content, "input_length", 1)
    ids = content.get("hash_ids")
    if not isinstance(ids, list):
        raise _BadLineError(f"hash_ids: {_shown(content, 'hash_ids')}; write a list of integers")
    for place, one in enumerate(ids):
        if type(one) is not int or one < 0:
            raise _BadLineError(f"hash_ids[{place}]: {one!r} is not valid; write an integer of 0 or more")
    if not input_tokens // block_tokens <= len(ids) <= -(-input_tokens // block_tokens):
        good = " or ".join(map(str, sorted({input_tokens // block_tokens, -(-input_tokens // block_tokens)})))
        raise _BadLineError(
            f"hash_ids: {len(ids)} ids for input_length {input_tokens}; with {block_tokens} tokens per id there must "
            f"be {good}; the option --block-tokens sets the tokens per id"
        )
    return Request(input_tokens, tuple(ids))


def _integer(content: dict[str, object], key: str, at_least: int) -> int:
    value = content.get(key)
    if type(value) is not int or value < at_least:
        raise _BadLineError(f"{key}: {_shown(content, key)}; write an integer of {at_least} or more")
    return value


def _shown(content: dict[str, object], key: str) -> str:
    return f"{content[key]!r} is not valid" if key in content else "missing"


class _Predecessors:
    """The id before each id. It must always be the same one, because an id stands for all tokens before it too."""

    def __init__(self) -> None:
        self._before: dict[int, int | None] = {}

    def check(self, ids: tuple[int, ...]) -> None:
        before: int | None = None
        for place, one in enumerate(ids):
            known = self._before.setdefault(one, before)
            if known != before:
                raise _BadLineError(
                    f"hash_ids[{place}]: {one} follows {_id(before)} here and {_id(known)} in an earlier request; "
                    "an id must stand for its block and all tokens before it"
                )
            before = one


def _id(one: int | None) -> str:
    return "nothing" if one is None else str(one)
