"""A plugin that puts one script of faults around every tier of a process, for runs on a real engine.

Name this module in an entry point of the group ``offload_core``, and give the tiers :data:`TIER_KEYS`. No fault happens
until :meth:`SCRIPT.start <offload_core.testing.faults.script.FaultScript.start>` is called in the process. If the tiers
run in an I/O process, set the variable ``OFFLOAD_FAULT_JOURNAL`` to a file, so that the script is the same in both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload_core.api.backend import Backend
from offload_core.api.hooks import TierInfo, hookimpl
from offload_core.testing.faults.script import FaultScript, ScriptSettings

OFFLOAD_API_VERSION = 1

DEADLINE_SECONDS = 0.3
"""Deadline of a lookup, a load and a store of a tier under the script; hanging calls last longer."""
TIER_KEYS: dict[str, Any] = {
    "lookup_timeout_seconds": DEADLINE_SECONDS,
    "load_timeout_seconds": DEADLINE_SECONDS,
    "store_timeout_seconds": DEADLINE_SECONDS,
    "breaker_pause_seconds": 0.1,
    "breaker_max_pause_seconds": 0.4,
}
"""The keys of a tier under the script. The breaker's pauses are short, so that most calls reach the faults."""
ALLOWANCE_SECONDS = 0.2
"""Time that a request may wait beyond its deadlines and a step, on a machine that is busy with other work."""

JOURNAL_VARIABLE = "OFFLOAD_FAULT_JOURNAL"
"""The variable that names the journal of :data:`SCRIPT`."""

SCRIPT = FaultScript(
    ScriptSettings(
        deadline_seconds=DEADLINE_SECONDS,
        hang_seconds=(0.5, 2.5),
        sick_seconds=(0.3, 1.0),
        sick_calls=(5, 20),
        well_seconds=(0.3, 0.8),
        well_calls=(5, 20),
        kinds_at_once=5,
        chance=(0.05, 0.3),
        lookup_share=0.45,
    ),
    journal=Path(os.environ[JOURNAL_VARIABLE]) if JOURNAL_VARIABLE in os.environ else None,
)


@hookimpl
def offload_wrap_backend(backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
    """Put the script around every tier."""
    return SCRIPT.wrap(backend)
