"""The state machine and the throughput report as tests of the contract class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import hypothesis
import pytest

from offload_core.api.backend import BackendType
from offload_core.testing.rig.clients import Rig
from offload_core.testing.state_machine.machine import (
    CAPACITY_BYTES,
    EXAMPLES,
    STATE_MACHINE_SETTINGS,
    check_with_state_machine,
)
from offload_core.testing.throughput import OBJECTS, Throughput, measure


class MachineContract:
    """All clauses together, in operations of random order."""

    machine_capacity_bytes = CAPACITY_BYTES
    """Limit of a bounded medium for the state machine; small, so that it evicts often."""

    machine_examples = EXAMPLES
    """Number of random examples of the state machine; lower it if a medium takes minutes for them."""

    if TYPE_CHECKING:  # the class of the whole contract has them
        backend_type: ClassVar[BackendType]

        def bounded_options(self, options: Mapping[str, Any], capacity_bytes: int) -> dict[str, Any]: ...

    def test_state_machine_finds_no_broken_clause(self, rig: Rig, options: Mapping[str, Any]) -> None:
        capacity = self.machine_capacity_bytes if rig.capabilities().bounded else None
        if capacity is not None:
            options = self.bounded_options(options, capacity)
        settings = hypothesis.settings(STATE_MACHINE_SETTINGS, max_examples=self.machine_examples)
        check_with_state_machine(self.backend_type, options, capacity_bytes=capacity, settings=settings)

    @pytest.mark.offload_throughput
    def test_throughput(self, rig: Rig, offload_throughput: list[tuple[str, Throughput]]) -> None:
        async def measured() -> list[Throughput]:
            backend = (await rig.client()).backend
            return [one for size, count in OBJECTS for one in await measure(backend, size, count)]

        name = f"{type(self).__name__} ({self.backend_type.name})"
        offload_throughput += [(name, one) for one in rig.run(measured())]
