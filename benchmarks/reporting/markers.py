"""Blocks between markers in a Markdown document; a script writes them, and nobody edits them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BLOCK = re.compile(r"(?P<begin><!-- results: (?P<name>\w+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL)


def names_in(text: str) -> list[str]:
    """Return the names of the blocks in order."""
    return [found["name"] for found in _BLOCK.finditer(text)]


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """Return the text with every block replaced.

    Raises:
        KeyError: ``blocks`` lacks a block of the text.
    """
    return _BLOCK.sub(lambda found: f"{found['begin']}\n{blocks[found['name']]}\n\n{found['end']}", text)
