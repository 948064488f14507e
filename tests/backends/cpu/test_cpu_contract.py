"""The cpu backend keeps the contract.

Its medium is memory of its own process: nothing can take it away (C23), and no other client shares it (C24). So it has
no ``take_away`` and no ``die_holding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from offload_backend_cpu import CpuBackend, CpuOptions
from offload_backend_cpu.arena import PAGE_BYTES
from offload_backend_cpu.plugin import CPU

from offload_core.api.backend import BackendContext, BackendType
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.state_machine.machine import EXAMPLES


class TestCpu(BackendContract):
    backend_type = CPU
    machine_examples = 60  # the long tests run them all
    machine_capacity_bytes = 32 * PAGE_BYTES  # an object of a byte takes a page

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {"capacity": "256MiB"}


@pytest.mark.long
class TestCpuAtLength(TestCpu):
    machine_examples = EXAMPLES


class MappedCpu(CpuBackend):
    """The backend as in an I/O process, whose memory others map."""

    def __init__(self, options: CpuOptions, context: BackendContext) -> None:
        super().__init__(options, replace(context, lends_to_processes=True))


@pytest.mark.long
class TestCpuThatOthersMap(TestCpu):
    backend_type = BackendType(CPU.name, MappedCpu, CpuOptions)
