"""Finds plugins and keeps a report of what went wrong with each.

Plugins are modules named by entry points of the group ``offload_core``. Each entry point is loaded on its own, so one
that fails never stops the others; its error is kept and raised only when a configuration needs that plugin. A name that
two of them claim, of an entry point or of a backend type, is given to neither. pluggy on its own would stop at the
first failure, skip a second distribution that uses the same name without a word, and notice a misspelt hook only when
asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

import pluggy

from offload_core import hookspecs
from offload_core.backend import Backend, BackendOptions, BackendType
from offload_core.errors import PluginError

ENTRY_POINT_GROUP = "offload_core"


@dataclass(frozen=True)
class PluginReport:
    """What became of one entry point."""

    name: str
    distribution: str
    backend_types: tuple[str, ...] = ()
    error: str | None = None


class PluginRegistry:
    """Backend types by name, and the report of all plugins."""

    def __init__(self, types: Sequence[BackendType], reports: Sequence[PluginReport]) -> None:
        self.backend_types = {registered.name: registered for registered in types}
        self.reports = tuple(reports)

    def backend_type(self, name: str) -> BackendType:
        """Return the backend type ``name``.

        Raises:
            PluginError: no plugin provides it, with what is there and which plugins failed and why.
        """
        found = self.backend_types.get(name)
        if found is None:
            known = ", ".join(sorted(self.backend_types)) or "none"
            failed = "".join(
                f"; plugin {r.name!r} of {r.distribution} failed: {r.error}" for r in self.reports if r.error
            )
            raise PluginError(
                f"no plugin provides the backend type {name!r}; known types: {known}{failed}; "
                f"install the package that provides it (entry point group {ENTRY_POINT_GROUP!r})"
            )
        return found


def load_plugins(points: Iterable[EntryPoint] | None = None) -> PluginRegistry:
    """Load all plugins, by default those of the installed distributions."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP) if points is None else points, key=lambda p: p.name)
    loaded: list[tuple[EntryPoint, list[BackendType], str | None]] = []
    for point in found:
        try:
            _refuse_twins(point, found)
            loaded.append((point, _registered_types(_load_module(point)), None))
        except (Exception, SystemExit) as error:  # whatever a stranger's module raises must not stop the other plugins
            loaded.append((point, [], f"{type(error).__name__}: {error}"))
    owners: dict[str, list[str]] = {}
    for point, provided, _ in loaded:
        for registered in provided:
            owners.setdefault(registered.name, []).append(_distribution(point))
    types: list[BackendType] = []
    reports: list[PluginReport] = []
    for point, provided, problem in loaded:
        for name in [registered.name for registered in provided if len(owners[registered.name]) > 1]:
            provided = []
            problem = f"the backend type {name!r} is provided by {' and '.join(owners[name])}; uninstall one of them"
        types.extend(provided)
        names = tuple(registered.name for registered in provided)
        reports.append(PluginReport(point.name, _distribution(point), names, problem))
    return PluginRegistry(types, reports)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def _refuse_twins(point: EntryPoint, found: Sequence[EntryPoint]) -> None:
    twins = [other for other in found if other.name == point.name]
    if len(twins) > 1:
        names = " and ".join(sorted(twin.dist.name if twin.dist else "?" for twin in twins))
        raise PluginError(f"the entry point name {point.name!r} is used by {names}; uninstall one of them")


def _load_module(point: EntryPoint) -> ModuleType:
    module = point.load()
    if not isinstance(module, ModuleType):
        raise PluginError(f"entry point {point.value!r} is {module!r}; it must name a module that holds hook functions")
    return module


def _registered_types(module: ModuleType) -> list[BackendType]:
    """Register ``module`` with a plugin manager of its own, check its hooks, and call the registration hook."""
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs.HookSpecs)
    manager.register(module)
    manager.check_pending()
    callers = manager.get_hookcallers(module)
    if not callers:
        raise PluginError(
            f"module {module.__name__} has no hook; mark its functions with offload_core.hookspecs.hookimpl"
        )
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if inspect.iscoroutinefunction(implementation.function):
                raise PluginError(f"hook {caller.name} is an async def; hooks are plain functions")
    result = [registered for group in manager.hook.offload_register_backends() for registered in group]
    for registered in result:
        _check_type(registered)
    return result


def _check_type(registered: object) -> None:
    if not isinstance(registered, BackendType):
        raise PluginError(f"offload_register_backends returned {registered!r}; it must return BackendType objects")
    if not (isinstance(registered.backend, type) and issubclass(registered.backend, Backend)):
        raise PluginError(f"backend type {registered.name!r}: {registered.backend!r} is not a subclass of Backend")
    if not (isinstance(registered.options, type) and issubclass(registered.options, BackendOptions)):
        raise PluginError(
            f"backend type {registered.name!r}: {registered.options!r} is not a subclass of BackendOptions"
        )
