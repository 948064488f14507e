"""The contract of a backend as a pytest class: a subclass of it tests clauses C1 to C26 of plugins.md.

A complete test file::

    import pytest
    from offload_core.testing import BackendContract
    from offload_backend_sqlite.plugin import SQLITE

    class TestSqlite(BackendContract):
        backend_type = SQLITE

        @pytest.fixture
        def options(self, tmp_path):
            return {"path": str(tmp_path / "kv.db")}

The tests are plain functions and need no plugin for asynchronous tests. Clauses about a capability that the backend
does not declare (:class:`offload_core.api.backend.Capabilities`) are skipped. The only way to opt out of another clause
is::

    @pytest.mark.xfail(reason="the server cannot say an object's size")
    def test_c16_an_object_of_another_size_is_corrupt(self, rig):
        super().test_c16_an_object_of_another_size_is_corrupt(rig)

Any other way to leave a clause untested is refused; see :func:`weakened`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import pytest

from offload_core.api.backend import BackendType
from offload_core.api.capabilities import Capabilities
from offload_core.testing.contract.buffers import BuffersContract
from offload_core.testing.contract.bytes import BytesContract
from offload_core.testing.contract.capacity import CAPACITY_BYTES, CapacityContract
from offload_core.testing.contract.failures import FailuresContract
from offload_core.testing.contract.loop import LoopContract
from offload_core.testing.contract.machine import MachineContract
from offload_core.testing.contract.names import NamesContract
from offload_core.testing.contract.options import OptionsContract
from offload_core.testing.contract.short_ways import LendingContract, OneCallContract, SealingContract
from offload_core.testing.contract.spares import SparesContract
from offload_core.testing.contract.visibility import VisibilityContract
from offload_core.testing.rig.clients import TEST_SECONDS, Rig


class BackendContract(
    BytesContract,
    NamesContract,
    VisibilityContract,
    BuffersContract,
    LoopContract,
    CapacityContract,
    SparesContract,
    LendingContract,
    OneCallContract,
    SealingContract,
    FailuresContract,
    OptionsContract,
    MachineContract,
):
    """Base of a backend's tests: set ``backend_type`` and write the fixture ``options``.

    You may also override:

    - ``damage``, to test damaged objects;
    - ``take_away`` and ``bring_back``, to test a medium that is gone;
    - ``die_holding``, to test a client that dies;
    - ``bounded_options``, if the key for a limit is not ``capacity``;
    - ``largest_object_bytes``, if objects of 64 MiB are too large;
    - ``test_seconds``, ``many_objects``, ``watch_seconds`` and ``recovery_seconds``, for a slow medium.
    """

    backend_type: ClassVar[BackendType]
    """The backend type that the plugin registers."""

    test_seconds = TEST_SECONDS
    """Longest time of one test; after it the backend counts as hung. The state machine has ``machine_examples``."""

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """The tier's own keys, for an empty medium; every test gets its own medium."""
        _refuse(
            self,
            "a fixture `options` that returns the tier's own keys, for a fresh medium each time",
            """
    @pytest.fixture
    def options(self, tmp_path):
        return {"path": str(tmp_path / "objects")}""",
        )

    def bounded_options(self, options: Mapping[str, Any], capacity_bytes: int) -> dict[str, Any]:
        """Return ``options`` with a limit of ``capacity_bytes``, for a backend that declares ``bounded``."""
        return {**options, "capacity": capacity_bytes}

    @pytest.fixture
    def rig(self, options: Mapping[str, Any]) -> Iterator[Rig]:
        """Clients of the medium of ``options``, and their event loop."""
        if not isinstance(getattr(self, "backend_type", None), BackendType):
            _refuse(
                self,
                "a class attribute `backend_type`, the BackendType that your plugin registers",
                """
    backend_type = BackendType("word", YourBackend, YourOptions)""",
            )
        with Rig(self.backend_type, options, self.test_seconds) as rig:
            yield rig

    @pytest.fixture
    def persistent_rig(self, rig: Rig) -> Rig:
        """A rig whose medium outlives its clients."""
        return _needs(rig, "persistent")

    @pytest.fixture
    def shared_rig(self, rig: Rig) -> Rig:
        """A rig whose medium several clients can use at once."""
        return _needs(rig, "shared")

    @pytest.fixture
    def listing_rig(self, rig: Rig) -> Rig:
        """A rig whose clients list their objects."""
        return _needs(rig, "lists")

    @pytest.fixture
    def sizing_rig(self, rig: Rig) -> Rig:
        """A rig whose clients know an object's size before they load it."""
        return _needs(rig, "sizes")

    @pytest.fixture
    def not_listing_rig(self, rig: Rig) -> Rig:
        """A rig whose clients do not list their objects."""
        if rig.capabilities().lists:
            pytest.skip("capability lists is declared")
        return rig

    @pytest.fixture
    def bounded_rig(self, rig: Rig, options: Mapping[str, Any]) -> Iterator[Rig]:
        """A rig whose medium has a limit of 1 MiB."""
        _needs(rig, "bounded")
        limited = self.bounded_options(options, CAPACITY_BYTES)
        with Rig(self.backend_type, limited, self.test_seconds) as bounded:
            yield bounded

    @pytest.fixture
    def shared_bounded_rig(self, bounded_rig: Rig) -> Rig:
        """A rig whose medium has a limit of 1 MiB that several clients share."""
        return _needs(bounded_rig, "shared")

    @pytest.fixture
    def lasting_rig(self, rig: Rig) -> Rig:
        """A rig whose medium does not evict by itself."""
        if rig.capabilities().evicts:
            pytest.skip("capability evicts is declared")
        return rig

    @pytest.fixture
    def sparing_rig(self, bounded_rig: Rig) -> Rig:
        """A rig whose medium has a limit of 1 MiB and knows spare objects."""
        return _needs(bounded_rig, "spares")

    @pytest.fixture
    def lending_rig(self, rig: Rig) -> Rig:
        """A rig whose clients lend their memory."""
        return _needs_to_lend(rig)

    @pytest.fixture
    def lending_bounded_rig(self, bounded_rig: Rig) -> Rig:
        """A rig whose medium has a limit of 1 MiB and lends its memory."""
        return _needs_to_lend(bounded_rig)

    @pytest.fixture
    def one_call_rig(self, rig: Rig) -> Rig:
        """A rig whose clients load in one call."""
        if not rig.loads_in_one_call():
            pytest.skip("the backend has no load_and_check")
        return rig

    @pytest.fixture
    def sealing_rig(self, rig: Rig) -> Rig:
        """A rig whose clients have stores that seal."""
        if not rig.seals_stores():
            pytest.skip("the backend has no store_and_seal")
        return rig

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in _required_tests():
            reason = weakened(cls, name, _marks(cls))
            if reason is not None:
                raise TypeError(reason)


def contract_tests() -> dict[str, Any]:
    """Return every test of one clause by its name."""
    return {name: test for name, test in _required_tests().items() if name.startswith("test_c")}


@functools.cache
def _required_tests() -> Mapping[str, Any]:
    """Return the tests that no subclass may leave out: those of single clauses, and the state machine."""
    names = [name for name in dir(BackendContract) if name.startswith(("test_c", "test_state_machine"))]
    return MappingProxyType({name: inspect.getattr_static(BackendContract, name) for name in names})


def weakened(item_class: type | None, test_name: str, marks: Iterable[pytest.Mark]) -> str | None:
    """Return the reason to refuse a test of the contract that does not run as written; ``None`` if it does run so.

    A test may be skipped because a capability is not declared, and may be opted out of by ``xfail`` with a reason.
    A test that is replaced otherwise is refused. So are the marks ``skip`` and ``skipif``, at any level.

    Args:
        item_class: the class that pytest collected the test from, if any.
        test_name: the name of the test's function.
        marks: all marks that apply to the test: its own, its class's and its module's.
    """
    if item_class is None or not issubclass(item_class, BackendContract) or test_name not in _required_tests():
        return None
    test = f"{item_class.__name__}.{test_name}"
    cure = "a clause is opted out of by a capability that is not declared, or by pytest.mark.xfail(reason='why')"
    found = inspect.getattr_static(item_class, test_name)
    own = _marks(found)
    marks = [*marks, *own]
    for mark in marks:
        if mark.name in ("skip", "skipif"):
            return f"{test} is marked {mark.name}; {cure}"
        if mark.name == "xfail" and not str(mark.kwargs.get("reason") or "").strip():
            return f"{test} is marked xfail without a reason; {cure}"
    if found is _required_tests()[test_name]:
        return None
    if not callable(found) or not any(mark.name == "xfail" for mark in own):
        return f"{test} is replaced by {found!r}; {cure}"
    return None


def _marks(found: Any) -> list[pytest.Mark]:
    marks = getattr(found, "pytestmark", [])
    return [
        mark.mark if isinstance(mark, pytest.MarkDecorator) else mark
        for mark in (marks if isinstance(marks, list) else [marks])
    ]


def _needs(rig: Rig, capability: str) -> Rig:
    declared: Capabilities = rig.capabilities()
    if not getattr(declared, capability):
        pytest.skip(f"capability {capability} is not declared")
    return rig


def _needs_to_lend(rig: Rig) -> Rig:
    _needs(rig, "lends")
    if not rig.lends():
        pytest.skip("nothing is lent, since a subclass overrides loads or stores alone")
    return rig


def _refuse(test: object, missing: str, example: str) -> NoReturn:
    pytest.fail(f"{type(test).__name__} needs {missing}, for example:\n{example}", pytrace=False)
