"""Log records of the I/O process on their way to the engine's log, where the user's settings apply."""

from __future__ import annotations

import contextlib
import logging

from offload_core.io_process.control import ControlSocket, Record

_MAX_TEXT = 8000


class LogSender(logging.Handler):
    """Sends each record to the engine's process. A record that the socket cannot take now is dropped.

    Args:
        end: a socket for log records alone, so that many of them delay nothing else.
    """

    def __init__(self, end: ControlSocket) -> None:
        super().__init__()
        end.set_blocking(False)
        self._end = end
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, with the text of its exception."""
        with contextlib.suppress(OSError):
            self._end.send({"log": [record.name, record.levelno, self.format(record)[:_MAX_TEXT]]})


def relay(record: Record) -> None:
    """Log a record of the I/O process in this process."""
    name, level, text = record["log"]
    log = logging.getLogger(name)
    if log.isEnabledFor(level):
        log.log(level, "%s", text)
