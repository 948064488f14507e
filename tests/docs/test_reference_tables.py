"""The generated tables of the documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.reference_tables import documents, reference_tables, with_tables


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_tables_are_those_that_make_docs_writes(path: Path) -> None:
    assert path.read_text() == with_tables(path.read_text()), "run `make docs`"


def test_every_table_stands_in_one_document() -> None:
    named = [name for path in documents() for name in re.findall(r"<!-- generated: ([\w ]+) -->", path.read_text())]
    assert sorted(named) == sorted(reference_tables())
