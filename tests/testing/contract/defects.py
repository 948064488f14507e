"""The description of a broken backend: its defect, and the contract's tests that must find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload_core.api.backend import BackendType
from tests.testing.contract.reference import ReferenceBackend, ReferenceOptions


@dataclass(frozen=True)
class Broken:
    """A backend that breaks one clause.

    Args:
        backend_type: the reference backend with the defect that the class name says.
        message: a pattern for the failures' messages, all of them.
        tests: the only tests that fail, ``test_`` left out.
        members: attributes of its contract class.
    """

    backend_type: BackendType
    message: str
    tests: tuple[str, ...]
    members: Mapping[str, Any] = field(default_factory=dict)

    @property
    def clause(self) -> str:
        return self.message.partition(":")[0]

    @property
    def name(self) -> str:
        found = self.backend_type
        return (found.backend if found.options is ReferenceOptions else found.options).__name__


def backend(backend: type[ReferenceBackend], message: str, *tests: str, **members: Any) -> Broken:
    """Describe a backend. It lends memory only to break that clause: another defect would be seen there too."""
    if not message.startswith("C25:"):
        quiet = replace(backend.capabilities, lends=False)
        backend = type(backend.__name__, (backend,), {"capabilities": quiet, "__module__": backend.__module__})
    return Broken(BackendType("broken", backend, ReferenceOptions), message, tests, members)


def options(options: type[ReferenceOptions], message: str, *tests: str) -> Broken:
    return Broken(BackendType("broken", ReferenceBackend, options), message, tests)
