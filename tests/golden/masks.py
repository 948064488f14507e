"""Prose and measured numbers, taken out of documents, so that what is left can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]

SCHEMA_PROSE = frozenset({"description", "title", "markdownDescription"})
REPORT_PROSE = frozenset({"error", "skipped", "note", "reason", "refusal"})


def as_json(document: Any) -> str:
    """Return a document as golden files have it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def without_prose(schema: Any) -> Any:
    """Return a JSON schema without its texts; a property that is named like one of them stays."""
    if isinstance(schema, list):
        return [without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_prose(value)
        for key, value in schema.items()
        if not (key in SCHEMA_PROSE and isinstance(value, str))
    }


def masked(document: Any, names: Collection[str] = (), *, keep_floats: bool = False) -> Any:
    """Return a command's document with a word in place of each text for people and each measured number.

    Args:
        names: keys whose values depend on the machine.
        keep_floats: they are calculated, not measured.
    """
    if isinstance(document, list):
        return [masked(item, names, keep_floats=keep_floats) for item in document]
    if isinstance(document, float) and not keep_floats:
        return "<float>"
    if not isinstance(document, dict):
        return document
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in names or (key in REPORT_PROSE and value is not None):
            result[key] = f"<{type(value).__name__}>"
        elif key == "warnings":
            result[key] = [f"<{type(warning).__name__}>" for warning in value]
        elif key == "problems":
            result[key] = sorted(path_of(problem) for problem in value)
        else:
            result[key] = masked(value, names, keep_floats=keep_floats)
    return result


def path_of(problem: str) -> str:
    """Return the dotted path that a configuration's problem begins with."""
    return problem.split(":")[0]


def measured(table: str) -> str:
    """Return a table with a word for each measured number, and without the width of its columns."""
    table = re.sub(r"\b\d+(\.\d+)? [KMGT]?i?B/s", "<n>", table)
    table = re.sub(r"\b\d+\.\d+\b", "<n>", table)
    table = re.sub(r"(store|lookup|load)( +\d+ +)\d+ ", r"\1\2<n> ", table)
    return re.sub(r" +", " ", re.sub(r"─+", "─", table))
