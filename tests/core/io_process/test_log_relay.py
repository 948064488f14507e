"""Log records on their way from the I/O process to the engine's log."""

from __future__ import annotations

import logging

from offload_core.io_process.control import ControlSocket
from offload_core.io_process.log_relay import LogSender


def test_a_log_call_with_wrong_arguments_raises_nothing_and_the_next_one_is_sent() -> None:
    ours, theirs = ControlSocket.pair()
    sender = LogSender()
    sender.add(ours)
    log = logging.Logger("plugin")
    log.addHandler(sender)
    log.warning("%d objects", "many")
    log.warning("%d objects", 3)
    received = theirs.receive()
    assert received is not None
    assert received[0] == {"log": ["plugin", logging.WARNING, "3 objects"]}
    ours.close()
    theirs.close()
