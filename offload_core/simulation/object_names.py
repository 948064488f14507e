"""Names of the objects and boundaries of a recorded prompt.

The engine's block hash at the last token of a unit names the unit and all tokens before it. A trace has an id per block
of tokens instead. So a name here is the id of the block with that last token, and the token's place in the block. Both
are in one number, because numbers are the fastest keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.planning.packs import Pack


class ObjectNames:
    """Names for all prompts of a trace.

    Args:
        packs: objects of different packs have different names.
        block_tokens: tokens per id of the trace.
    """

    def __init__(self, packs: Sequence[Pack], block_tokens: int) -> None:
        self._packs = packs
        self._block_tokens = block_tokens

    def boundaries(self, ids: Sequence[int], step_tokens: int, tokens: int) -> list[int]:
        """Return the names of all boundaries of a prompt up to ``tokens``, the shallowest first."""
        block = self._block_tokens
        return [ids[last // block] * block + last % block for last in range(step_tokens - 1, tokens, step_tokens)]

    def objects(self, ids: Sequence[int], tokens: int) -> dict[str, list[int]]:
        """Return the names of the whole units of a prompt's first ``tokens`` tokens, by the name of their pack."""
        count = len(self._packs)
        return {
            pack.name: [name * count + index for name in self.boundaries(ids, pack.unit_tokens, tokens)]
            for index, pack in enumerate(self._packs)
        }
