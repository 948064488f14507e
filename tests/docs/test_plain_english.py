"""Documents, docstrings and messages keep the rules of plain English that a program can check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.plain_english import (
    docstring_problems,
    document_problems,
    message_problems,
    sentence_problems,
    sentences,
    words,
)
from tests.support.source_files import relative

DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "plugins.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
FOLDERS = ("offload_core", "backends", "examples", "benchmarks", "tests/support")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_documents(path: Path) -> None:
    assert [str(problem) for problem in document_problems(path, ROOT)] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings(path: Path) -> None:
    assert [str(problem) for problem in docstring_problems(path, ROOT)] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_messages(path: Path) -> None:
    assert [str(problem) for problem in message_problems(path, ROOT)] == []


def test_readme_has_at_most_700_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize(
    ("sentence", "broken"),
    [
        ("Objects that nobody uses are evicted.", 0),
        ("What nobody uses is evicted.", 1),
        ("Evicted is what nobody uses.", 1),
        ("The engine, who asks first, waits.", 1),
        ("Authors who publish a package name it.", 0),
        ("What does it cost?", 0),
        ("Write `what` there.", 0),
        (" ".join(["word"] * 25) + ".", 0),
        (" ".join(["word"] * 26) + ".", 1),
    ],
)
def test_the_rules_see_what_they_should(sentence: str, broken: int) -> None:
    assert len(list(sentence_problems(sentence))) == broken


def test_sentences_end_at_full_stops_and_paragraphs() -> None:
    assert list(sentences("One is `a.b`. Two,\nstill two.\n\nThree")) == ["One is `a.b`.", "Two, still two.", "Three"]
    assert words("The key `a b c` of [the table](docs/x.md) is 512 MiB.") == 9
