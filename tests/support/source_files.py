"""The project's source files, as tests of the house look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT


def relative(path: Path) -> str:
    """Return a path from the root of the repository on, for names of tests and messages."""
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each imported module with the names taken from it, for imports at every place in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: write the whole name of the module, not a relative import"
            yield node.module or "", tuple(alias.name for alias in node.names)
