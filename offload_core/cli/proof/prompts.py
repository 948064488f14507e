"""Prompts whose ends lie at, before and behind the borders of chunks and windows."""

from __future__ import annotations

import random
from collections.abc import Iterable

MAX_PROMPT_TOKENS = 16384
"""The longest prompt; a model with longer chunks gets prompts of up to two chunks."""
ANSWER_TOKENS = 16
_FIRST_TOKEN = 10


def prompt_lengths(chunk_tokens: int, windows: Iterable[int], model_tokens: int) -> list[int]:
    """Return the lengths of the prompts, ascending.

    Each has at least one chunk and a token more, since nothing can be loaded of a shorter one. No prompt and its answer
    exceed ``model_tokens``. The list is empty if no such prompt exists.
    """
    longest = min(model_tokens - ANSWER_TOKENS, max(MAX_PROMPT_TOKENS, 2 * chunk_tokens + 3))
    wanted = {chunk_tokens + 1, 2 * chunk_tokens + 3, 3 * chunk_tokens - 1, 5 * chunk_tokens + chunk_tokens // 2}
    for window in windows:
        chunks = -(-window // chunk_tokens) + 1
        wanted |= {window + chunk_tokens + 1, chunks * chunk_tokens + 3}
    fitting = {length for length in wanted if chunk_tokens < length <= longest}
    if not fitting and chunk_tokens < longest:
        fitting = {longest}
    return sorted(fitting)


def prompt(length: int, vocabulary: int) -> list[int]:
    """Return the prompt of a length. Its tokens are the same in each run."""
    generator = random.Random(length)
    first = min(_FIRST_TOKEN, vocabulary - 1)
    return [generator.randrange(first, vocabulary) for _ in range(length)]
