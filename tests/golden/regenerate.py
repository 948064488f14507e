"""Writes golden files anew: ``python -m tests.golden.regenerate [BEGINNING OF A NAME …]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.documents import DOCUMENTS, OBJECTS, produced
from tests.golden.masks import DATA


def main(beginnings: list[str]) -> None:
    """Write all files, or those whose names begin with one of ``beginnings``."""
    for name, producer in {**OBJECTS, **DOCUMENTS}.items():
        if name.startswith(tuple(beginnings or [""])):
            with tempfile.TemporaryDirectory() as folder:
                content = produced(producer, Path(folder))
            path = DATA / name
            changed = not path.exists() or path.read_bytes() != content
            path.write_bytes(content)
            print(f"{name}: {'written' if changed else 'as it was'}")


if __name__ == "__main__":
    main(sys.argv[1:])
