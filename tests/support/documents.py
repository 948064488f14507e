"""Code blocks of the project's documents."""

from __future__ import annotations

import re


def blocks(text: str, language: str = r"\w*") -> list[str]:
    """Return the code blocks of a Markdown text, of one language or of all."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
