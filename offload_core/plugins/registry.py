"""The installed plugins: the search for them, a report of each, and the hooks of the working ones.

A plugin is a module that an entry point of the group ``offload_core`` names. Each plugin is loaded on its own
(:mod:`offload_core.plugins.loading`). A plugin that fails never stops the others. The core uses no part of it, and
keeps its error until a configuration needs that plugin.

If two plugins claim one entry-point name, module or backend type, both are refused. Plugins are ordered by entry-point
name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NamedTuple

import pluggy

from offload_core.api.backend import Backend, BackendType
from offload_core.api.errors import PluginError, did_you_mean
from offload_core.api.events import Event
from offload_core.api.hooks import TierInfo
from offload_core.plugins.loading import PLUGIN_ERRORS, Candidate, call, describe

ENTRY_POINT_GROUP = "offload_core"

_INSTALL = f"install the package that provides it (entry point group {ENTRY_POINT_GROUP!r})"


@dataclass(frozen=True)
class PluginReport:
    """The report of one entry point.

    Args:
        name: name of the entry point.
        distribution: name of the distribution that declares it.
        version: the distribution's version.
        module: the entry point's value.
        api_version: the module's ``OFFLOAD_API_VERSION``, or ``None`` if loading failed earlier.
        hooks: names of the module's hooks; empty if loading failed earlier.
        backend_types: names of the backend types that users can write for ``type``.
        missing: the missing requirements of these types, each with the command that installs it.
        error: the reason of a failure, on one line. The core uses no part of such a plugin. ``None`` if it works.
    """

    name: str
    distribution: str
    version: str | None = None
    module: str = ""
    api_version: int | None = None
    hooks: tuple[str, ...] = ()
    backend_types: tuple[str, ...] = ()
    error: str | None = None
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {' '.join(filter(None, (self.distribution, self.version)))}"


class LoadedPlugin(NamedTuple):
    """A working plugin and its hooks."""

    report: PluginReport
    relay: pluggy.HookRelay


class Observer(NamedTuple):
    """A plugin's ``offload_observe``."""

    report: PluginReport
    notify: Callable[[Event], object]
    """The hook itself. It may raise any error and take any time."""


class PluginRegistry:
    """The backend types and hooks of all plugins, and the report of each plugin.

    Args:
        types: backend types, each with a name of its own.
        reports: one report per entry point.
        plugins: the working plugins, in the order of the calls of their hooks.
    """

    def __init__(
        self,
        types: Iterable[BackendType] = (),
        reports: Iterable[PluginReport] = (),
        plugins: Iterable[LoadedPlugin] = (),
    ) -> None:
        self.backend_types = {registered.name: registered for registered in types}
        self.reports = tuple(reports)
        self._plugins = tuple(plugins)

    def backend_type(self, name: str) -> BackendType:
        """Return the backend type ``name``.

        Raises:
            PluginError: no plugin provides it, or a module that it requires is missing. The message lists the available
                types and the failed plugins, or the command that installs the module.
        """
        found = self.backend_types.get(name)
        if found is None:
            available = ", ".join(sorted(self.backend_types)) or "none"
            failed = [f"\n      - {report}: {report.error}" for report in self.reports if report.error]
            raise PluginError(
                f"no plugin provides the backend type {name!r}{did_you_mean(name, self.backend_types)}; "
                f"known types: {available}; {_INSTALL}"
                + ("".join(["\n    plugins that failed and might provide it:", *failed]) if failed else "")
            )
        if missing := missing_requirements(found):
            raise PluginError(f"backend type {name!r} cannot be used: {'; '.join(missing)}")
        return found

    def require(self, name: str) -> None:
        """Check that the plugin ``name`` works.

        Raises:
            PluginError: it is not installed, or it failed; the message has the reason.
        """
        installed = {report.name: report for report in self.reports}
        if name not in installed:
            names = ", ".join(sorted(installed)) or "none"
            raise PluginError(
                f"there is no plugin {name!r}{did_you_mean(name, installed)}; known plugins: {names}; {_INSTALL}"
            )
        if installed[name].error:
            raise PluginError(f"{installed[name]} failed: {installed[name].error}")

    def wrap(self, backend: Backend[Any], tier: TierInfo) -> Backend[Any]:
        """Offer ``backend`` to every plugin in turn. Each plugin gets the backend that the previous one returned.

        Raises:
            PluginError: a plugin's hook raised, or returned neither a backend nor ``None``.
        """
        for report, relay in self._with_hook("offload_wrap_backend"):
            try:
                wrapped = call(relay.offload_wrap_backend, backend=backend, tier=tier)
            except PLUGIN_ERRORS as error:
                raise PluginError(f"{report} failed to wrap tier {tier.name!r}: {describe(error)}") from error
            if wrapped is not None and not isinstance(wrapped, Backend):
                raise PluginError(
                    f"{report} wrapped tier {tier.name!r} in {wrapped!r}; "
                    "offload_wrap_backend must return a Backend or None"
                )
            backend = backend if wrapped is None else wrapped
        return backend

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The plugins with the hook ``offload_observe``."""
        return tuple(
            Observer(report, partial(_notify, relay.offload_observe))
            for report, relay in self._with_hook("offload_observe")
        )

    def _with_hook(self, hook: str) -> list[LoadedPlugin]:
        return [plugin for plugin in self._plugins if hook in plugin.report.hooks]


def _notify(hook: Callable[..., object], event: Event) -> None:
    call(hook, event=event)


def missing_requirements(backend_type: BackendType) -> list[str]:
    """Return a sentence per module that the backend type requires and that is not installed."""
    return [
        f"the Python module {required.module!r} is not installed; run: {required.install}"
        for required in backend_type.requires
        if not _is_installed(required.module)
    ]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # it is imported, and its code has cleared or replaced its __spec__
        return True


def load_plugins(points: Iterable[EntryPoint] | None = None) -> PluginRegistry:
    """Load all plugins. By default these are the plugins of the installed distributions."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP) if points is None else points, key=lambda point: point.name)
    candidates = _without_duplicates(Candidate(point) for point in found)
    _refuse_shared(candidates, "the entry point name {!r} is used", lambda one: [one.point.name])
    # A module with two names would wrap each backend twice.
    _refuse_shared(candidates, "the module {!r} is named as a plugin", lambda one: [one.module])
    for candidate in candidates:
        if candidate.error is None:
            candidate.load()
    _refuse_shared(
        candidates, "the backend type {!r} is provided", lambda one: [provided.name for provided in one.backend_types]
    )
    types: list[BackendType] = []
    reports: list[PluginReport] = []
    plugins: list[LoadedPlugin] = []
    for candidate in candidates:
        provided = candidate.backend_types if candidate.error is None else ()
        report = PluginReport(
            name=candidate.point.name,
            distribution=candidate.distribution,
            version=candidate.version,
            module=candidate.point.value,
            api_version=candidate.api_version,
            hooks=candidate.hooks,
            backend_types=tuple(registered.name for registered in provided),
            error=candidate.error,
            missing=tuple(text for registered in provided for text in missing_requirements(registered)),
        )
        types += provided
        reports.append(report)
        if candidate.error is None and candidate.relay is not None:
            plugins.append(LoadedPlugin(report, candidate.relay))
    return PluginRegistry(types, reports, plugins)


def _without_duplicates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Drop the repeated entry points of a distribution that is in two places of the search path."""
    unique: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        distribution = re.sub(r"[-_.]+", "-", candidate.distribution).lower()
        unique.setdefault((candidate.point.name, candidate.point.value, distribution), candidate)
    return list(unique.values())


def _refuse_shared(candidates: Sequence[Candidate], sharing: str, names: Callable[[Candidate], Iterable[str]]) -> None:
    """Refuse all candidates that share a name with another one."""
    owners_of: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        for name in names(candidate):
            owners_of[name].append(candidate)
    for name, sharers in owners_of.items():
        if len(sharers) > 1:
            owners = sorted({sharer.owner for sharer in sharers})
            problem = (
                f"{sharing.format(name)} by {' and '.join(owners)}; uninstall one of them"
                if len(owners) > 1
                else f"{sharing.format(name)} more than once by {owners[0]}; its author must choose one"
            )
            for sharer in sharers:
                sharer.error = sharer.error or problem
