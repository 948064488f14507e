"""Forks of a worker: a program that has an engine may fork, and the fork ends as every Python program does."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.standin.rig import Rig
from tests.standin.test_faults import prompt
from tests.support.polling import wait_until
from tests.support.standin.geometries import MODELS


def test_the_end_of_a_fork_leaves_the_tiers_of_the_engine_alone(rig: Rig) -> None:
    model = MODELS["gemma3"]()
    engine = rig.engine(model, io_process="engine", backends=[{"name": "ram", "type": "cpu", "capacity": "64MiB"}])
    rig.run(engine, prompt(model))
    if (pid := os.fork()) == 0:
        for worker in engine.workers:
            connector: Any = worker.connector
            connector.shutdown()  # which atexit calls too
        os._exit(3)
    ends: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ends.append(os.waitstatus_to_exitcode(status))
        return bool(ends)

    try:
        wait_until(has_ended, "the fork does not end")
    finally:
        if not ends:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert ends == [3]
    assert rig.run_again(engine, prompt(model)) > 0
