"""The buffers of one call, with guard bytes between them."""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.testing.state_machine.oracle import ContractError

_GUARD_BYTE = 0xC5
_GUARD_BYTES = 61
"""Length of the guard between two buffers; odd, so that buffers start at all alignments."""


class GuardedBuffers:
    """The buffers of one call, side by side in one piece of memory with guard bytes between them (C17)."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._memory = bytearray([_GUARD_BYTE]) * (sum(map(len, contents)) + _GUARD_BYTES * (len(contents) + 1))
        self._buffers: list[tuple[int, int]] = []
        start = _GUARD_BYTES
        for content in contents:
            self._buffers.append((start, start + len(content)))
            self._memory[start : start + len(content)] = content
            start += len(content) + _GUARD_BYTES
        self._after_call: bytes | None = None

    def views(self) -> list[memoryview]:
        """Return one writable view per buffer."""
        return [memoryview(self._memory)[start:end] for start, end in self._buffers]

    def end_call(self) -> None:
        """Check the guard bytes and overwrite the buffers, because the call has ended and its buffers are reused.

        Raises:
            ContractError: guard bytes have changed.
        """
        ends = [0, *(end for _, end in self._buffers)]
        starts = [*(start for start, _ in self._buffers), len(self._memory)]
        for end, start in zip(ends, starts, strict=True):
            if self._memory[end:start] != bytes([_GUARD_BYTE]) * (start - end):
                raise ContractError(f"C17: bytes beside the given buffers were written to, within {end} to {start}")
        for start, end in self._buffers:
            self._memory[start:end] = bytes([_GUARD_BYTE ^ 0xFF]) * (end - start)
        self._after_call = bytes(self._memory)

    def check_unchanged(self) -> None:
        """Check that nothing was written since :meth:`end_call`; before that call there is nothing to check.

        Raises:
            ContractError: a buffer or a guard has changed.
        """
        if self._after_call is not None and self._memory != self._after_call:
            raise ContractError("C7: a buffer was written to after the call that it was given to had ended")
