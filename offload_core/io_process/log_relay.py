"""Log records of the I/O process on their way to the engine's log, where the user's settings apply."""

from __future__ import annotations

import logging

from offload_core.io_process.control import ControlSocket, Record

_MAX_TEXT = 8000


class LogSender(logging.Handler):
    """Sends each record to one process of the engine: the first that is there.

    A record that the socket cannot take now is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[ControlSocket] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def add(self, end: ControlSocket) -> None:
        """Add a process of the engine.

        Args:
            end: a socket for log records alone, so that many of them delay nothing else.
        """
        end.set_blocking(False)
        self._ends.append(end)

    def remove(self, end: ControlSocket) -> None:
        """Close the socket of a process that has left."""
        self._ends.remove(end)
        end.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, with the text of its exception."""
        try:
            sent = {"log": [record.name, record.levelno, self.format(record)[:_MAX_TEXT]]}
        except Exception:  # its arguments do not fit its text
            self.handleError(record)
            return
        for end in self._ends.copy():
            try:
                end.send(sent)
            except BlockingIOError:
                return
            except OSError:  # that process is gone
                continue
            return


def relay(record: Record) -> None:
    """Log a record of the I/O process in this process."""
    name, level, text = record["log"]
    log = logging.getLogger(name)
    if log.isEnabledFor(level):
        log.log(level, "%s", text)
