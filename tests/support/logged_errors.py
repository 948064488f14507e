"""Errors in the log of the core, such as a second release of a lease; for tests that may cause none."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("offload_core")


class LoggedErrors(logging.Handler):
    """Collects errors from its making until :meth:`stop`."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        self.messages.append(f"{record.getMessage()}: {record.exc_info}")

    def stop(self) -> None:
        """Collect no more."""
        _LOGGER.removeHandler(self)
