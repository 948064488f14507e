"""The public test harness for authors of backends; ``plugins.md`` shows its use."""

from importlib.util import find_spec

for _module in ("hypothesis", "pytest"):
    if find_spec(_module) is None:
        raise ModuleNotFoundError(
            f"offload_core.testing needs {_module}, which is not installed; run: pip install 'offload-core[testing]'",
            name=_module,
        )

from offload_core.testing import strategies
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.faults.faulty_backend import FaultyBackend
from offload_core.testing.faults.kinds import (
    Fail,
    FlipBit,
    Full,
    Hang,
    Late,
    Lie,
    Lose,
    Reorder,
    Slow,
    Stall,
    Truncate,
)
from offload_core.testing.faults.plan import Call, Fault, FaultPlan, GoOn, Inject, Injected
from offload_core.testing.faults.script import FAULT_KINDS, FaultScript, ScriptSettings
from offload_core.testing.opening import open_backend
from offload_core.testing.rig.killed_process import hold_in_killed_process
from offload_core.testing.state_machine.machine import STATE_MACHINE_SETTINGS, check_with_state_machine
from offload_core.testing.state_machine.oracle import ContractError

__all__ = [
    "FAULT_KINDS",
    "STATE_MACHINE_SETTINGS",
    "BackendContract",
    "Call",
    "ContractError",
    "Fail",
    "Fault",
    "FaultPlan",
    "FaultScript",
    "FaultyBackend",
    "FlipBit",
    "Full",
    "GoOn",
    "Hang",
    "Inject",
    "Injected",
    "Late",
    "Lie",
    "Lose",
    "Reorder",
    "ScriptSettings",
    "Slow",
    "Stall",
    "Truncate",
    "check_with_state_machine",
    "hold_in_killed_process",
    "open_backend",
    "strategies",
]
