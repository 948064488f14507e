"""The core's check of an object on its way to the buffer."""

from __future__ import annotations

from collections.abc import Iterable

from offload_core.api import LoadCheck


class FirstRead:
    """Tells the check of an object's first read only. If a connection breaks, another one reads the object again.

    Args:
        check: the check.

    Attributes:
        is_right: the check has found the whole object right. Its buffer must not change any more, because the core
            does not check it again.
    """

    def __init__(self, check: LoadCheck) -> None:
        self._check = check
        self._has_begun = False
        self.is_right = False

    def fill(self, parts: Iterable[memoryview]) -> bool:
        """Tell the check of each part that arrives. Return whether it has found the whole object right."""
        is_first, self._has_begun = not self._has_begun, True
        for part in parts:
            self.is_right = is_first and self._check.filled(len(part))
        return self.is_right
