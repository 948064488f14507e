"""The tokens that a group must hold so that a prefix can be used: one policy per kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HitPolicy:
    """The tokens of a prefix of ``t`` tokens that a group reads when the engine continues after that prefix.

    * ``full``: every token below ``t``.
    * ``window``: the last ``window_tokens - 1`` tokens below ``t`` (a query attends to itself and to the
      ``window_tokens - 1`` tokens before it).
    * ``chunked``: the tokens of the attention chunk that ``t`` lies in, ``[t // A * A, t)`` with ``A`` the
      ``attention_chunk_tokens``; none where ``t`` is a multiple of ``A``.
    * ``state``: one recurrent state, the one after exactly ``t`` tokens.

    If a prefix does not need a token, no longer prefix needs it.
    """

    kind: Literal["full", "window", "chunked", "state"]
    window_tokens: int = 0
    attention_chunk_tokens: int = 0

    def first_needed_token(self, boundary_tokens: int) -> int:
        """Return the position of the first token that a prefix of ``boundary_tokens`` needs.

        The result is ``boundary_tokens`` if the prefix needs no token.
        """
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(0, boundary_tokens - self.window_tokens + 1)
        if self.kind == "chunked":
            return boundary_tokens - boundary_tokens % self.attention_chunk_tokens
        return max(0, boundary_tokens - 1)

    def needs_nothing_at_multiples_of(self, tokens: int) -> bool:
        """Return ``True`` if prefixes of every multiple of ``tokens`` need nothing of the group's cache."""
        if self.kind == "chunked":
            return tokens % self.attention_chunk_tokens == 0
        return self.kind == "window" and self.window_tokens == 1

    def __str__(self) -> str:
        if self.kind == "window":
            return f"window of {self.window_tokens} tokens"
        if self.kind == "chunked":
            return f"chunked local attention of {self.attention_chunk_tokens} tokens"
        return self.kind
