"""A failed assertion of a helper shows the values, as that of a test does."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import tests

FOLDER = Path(tests.__path__[0])


def _asserts(path: Path) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))


def test_every_helper_that_asserts_is_rewritten() -> None:
    helpers = [path for path in FOLDER.rglob("*.py") if path.name != "conftest.py" and _asserts(path)]
    names = [".".join(["tests", *path.relative_to(FOLDER).with_suffix("").parts]) for path in helpers]
    loaders = {name: spec.loader for name in names if (spec := find_spec(name)) is not None}
    assert len(loaders) > 100
    assert [name for name, loader in loaders.items() if type(loader).__name__ != "AssertionRewritingHook"] == []
