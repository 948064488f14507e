"""Traces: the layouts that are read, and the problems that are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ConfigError
from offload_core.simulation.trace import MAX_PROBLEMS, Request, Trace, read_trace
from tests.support.documents import blocks
from tests.support.paths import ROOT
from tests.support.prompt_traces import conversations, trace_of, write_lines, write_trace

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1], "conversation": 3}
HEADER = {"format": "offload-core trace", "version": 1, "block_tokens": 256}


def written(tmp_path: Path, *lines: Any) -> Path:
    return write_lines(
        tmp_path / "trace.jsonl", [line if isinstance(line, str) else json.dumps(line) for line in lines]
    )


def problems(path: Path, block_tokens: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as told:
        read_trace(path, block_tokens)
    assert told.value.source == f"{path} (trace)"
    return told.value.problems


def test_mooncakes_layout_has_512_tokens_per_id_and_may_have_other_keys(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, GOOD, "")) == Trace(512, [Request(700, (0, 1))])


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("header", [True, False])
def test_a_written_trace_is_read(tmp_path: Path, name: str, header: bool) -> None:
    trace = trace_of(conversations(3, 4, 40), 16)
    assert read_trace(write_trace(tmp_path / name, trace, header=header), None if header else 16) == trace
    assert trace.input_tokens == sum(request.input_tokens for request in trace.requests)


def test_the_last_part_of_a_block_may_have_an_id_or_none(tmp_path: Path) -> None:
    lines = [HEADER, {"input_length": 300, "hash_ids": [1]}, {"input_length": 300, "hash_ids": [1, 2]}]
    assert read_trace(written(tmp_path, *lines)).requests == [Request(300, (1,)), Request(300, (1, 2))]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no JSON: "),
        ("[" * 100_000, "no JSON: "),
        ([1], "not a JSON object; write one with input_length and hash_ids"),
        ({}, "input_length: missing; write an integer of 1 or more"),
        ({**GOOD, "input_length": 0}, "input_length: 0 is not valid; write an integer of 1 or more"),
        ({**GOOD, "input_length": True}, "input_length: True is not valid; "),
        ({**GOOD, "input_length": 7.5}, "input_length: 7.5 is not valid; "),
        ({"input_length": 700}, "hash_ids: missing; write a list of integers"),
        ({**GOOD, "hash_ids": "ab"}, "hash_ids: 'ab' is not valid; write a list of integers"),
        ({**GOOD, "hash_ids": [0, -1]}, "hash_ids[1]: -1 is not valid; write an integer of 0 or more"),
        ({**GOOD, "hash_ids": [0, None]}, "hash_ids[1]: None is not valid; "),
        (
            {**GOOD, "hash_ids": [0, 1, 2]},
            "hash_ids: 3 ids for input_length 700; with 512 tokens per id there must be 1 or 2; the option "
            "--block-tokens sets the tokens per id",
        ),
        (
            {**GOOD, "hash_ids": [7, 1]},
            "hash_ids[1]: 1 follows 7 here and 0 in an earlier request; an id must stand for its block and all tokens "
            "before it",
        ),
        ({**GOOD, "hash_ids": [1, 0]}, "hash_ids[0]: 1 follows nothing here and 0 in an earlier request; "),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, line: Any, problem: str) -> None:
    (told,) = problems(written(tmp_path, GOOD, "", line, GOOD))
    assert told.startswith(f"line 3: {problem}")


@pytest.mark.parametrize(
    ("header", "wanted", "problem"),
    [
        ({**HEADER, "format": "other"}, None, "format: 'other' is not known; the only format is 'offload-core trace'"),
        ({**HEADER, "version": 2}, None, "version: 2 is not known; this release reads version 1"),
        ({**HEADER, "block_tokens": 0}, None, "block_tokens: 0 is not valid; write an integer of 1 or more"),
        (HEADER, 512, "block_tokens: 256, but 512 was asked for; leave the option out"),
    ],
)
def test_a_bad_header_is_told(tmp_path: Path, header: Any, wanted: int | None, problem: str) -> None:
    assert problems(written(tmp_path, header, GOOD), wanted) == (f"line 1: {problem}",)


def test_traces_of_several_engines_in_one_file_are_told(tmp_path: Path) -> None:
    one = {"input_length": 300, "hash_ids": [0]}
    told = problems(written(tmp_path, HEADER, one, HEADER, one))
    assert told == (
        "line 3: a header in the middle: the ids of two files have nothing in common; simulate each file alone",
    )


def test_a_request_may_have_a_key_named_format(tmp_path: Path) -> None:
    one = {"input_length": 300, "hash_ids": [0], "format": "chat"}
    assert read_trace(written(tmp_path, HEADER, one)).requests == [Request(300, (0,))]


def test_the_option_may_repeat_the_header(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, HEADER, {"input_length": 9, "hash_ids": []}), 256).block_tokens == 256


def test_later_lines_are_not_read_after_ten_problems(tmp_path: Path) -> None:
    told = problems(written(tmp_path, *["{}"] * 50))
    assert len(told) == MAX_PROBLEMS + 1
    assert told[-1] == "later lines were not read"


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    assert problems(written(tmp_path, HEADER)) == ("it has no request; write one JSON object per line",)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    assert problems(tmp_path / "missing.jsonl")[0].startswith("cannot be read: [Errno 2] No such file")
    damaged = tmp_path / "trace.jsonl.gz"
    write_trace(damaged, trace_of(conversations(3, 4, 40), 16))
    whole = damaged.read_bytes()
    for content in (b"no gzip", whole[:-9], whole[:20] + bytes(8) + whole[28:]):
        damaged.write_bytes(content)
        assert problems(damaged, 16)[0].startswith("cannot be read: ")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert problems(tmp_path / "binary") == ("is not text; a trace is a file of JSON lines, or such a file as .gz",)


def test_the_lines_in_the_document_are_a_trace(tmp_path: Path) -> None:
    line, header = blocks((ROOT / "docs" / "sizing.md").read_text(), "json")
    assert read_trace(written(tmp_path, line.strip())).block_tokens == 512
    longer = line.replace("700", "500").strip()
    assert read_trace(written(tmp_path, header.strip(), longer)) == Trace(256, [Request(500, (0, 17))])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["input_length", "hash_ids", "format", "version", "block_tokens"])
LINES = (
    st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=20)
    | JSON_VALUES.map(json.dumps)
    | st.dictionaries(KEYS, JSON_VALUES).map(json.dumps)
)


@given(st.lists(LINES, max_size=6))
def test_any_file_is_read_or_refused_with_line_numbers(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = written(tmp_path_factory.mktemp("trace", numbered=True), *lines)
    told, trace = attempt(path)
    assert bool(told) != bool(trace.requests)
    assert all(problem.startswith(("line ", "it has no request", "later lines")) for problem in told)
    for tokens, ids in trace.requests:
        assert len(ids) in (tokens // trace.block_tokens, -(-tokens // trace.block_tokens))


def attempt(path: Path) -> tuple[tuple[str, ...], Trace]:
    try:
        return (), read_trace(path)
    except ConfigError as error:
        return error.problems, Trace(1, [])
