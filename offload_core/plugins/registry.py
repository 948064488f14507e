"""Finds plugins, keeps a report of each, and gives the core what those that work provide.

Plugins are modules named by entry points of the group ``offload_core``. Each is loaded on its own
(:mod:`offload_core.plugins.loading`): one that fails never stops the others, nothing of it is used, and its error is
kept until a configuration needs that plugin. What two of them claim (the name of an entry point, a module, a backend
type) is given to neither. The order of plugins is that of their entry-point names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import pluggy

from offload_core.api.backend import Backend, BackendType
from offload_core.api.errors import PluginError, did_you_mean
from offload_core.api.events import Event
from offload_core.api.hooks import TierInfo
from offload_core.plugins.loading import FOREIGN_ERRORS, Candidate, call, describe

ENTRY_POINT_GROUP = "offload_core"

_INSTALL = f"install the package that provides it (entry point group {ENTRY_POINT_GROUP!r})"


@dataclass(frozen=True)
class PluginReport:
    """What became of one entry point.

    Args:
        name: of the entry point.
        distribution: name of the distribution that declares it.
        version: the distribution's version.
        module: the entry point's value.
        api_version: what the module states as ``OFFLOAD_API_VERSION``, when loading came as far as that.
        hooks: names of the hooks it implements, when loading came as far as that.
        backend_types: what users can write for ``type``.
        error: why nothing of the plugin is used, on one line; ``None`` when it works.
    """

    name: str
    distribution: str
    version: str | None = None
    module: str = ""
    api_version: int | None = None
    hooks: tuple[str, ...] = ()
    backend_types: tuple[str, ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {' '.join(filter(None, (self.distribution, self.version)))}"


class LoadedPlugin(NamedTuple):
    """A plugin that works, and its hooks."""

    report: PluginReport
    relay: pluggy.HookRelay


class Observer(NamedTuple):
    """A plugin's ``offload_observe``."""

    report: PluginReport
    notify: Callable[[Event], object]
    """May raise anything and take any time."""


class PluginRegistry:
    """What all plugins provide together, and the report of each.

    Args:
        types: backend types, no two of one name.
        reports: every entry point that was found.
        plugins: those whose hooks are to be called, in that order.
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
            PluginError: no plugin provides it, with what is there and which plugins failed and why.
        """
        found = self.backend_types.get(name)
        if found is None:
            known = ", ".join(sorted(self.backend_types)) or "none"
            failed = [f"\n      - {report}: {report.error}" for report in self.reports if report.error]
            raise PluginError(
                f"no plugin provides the backend type {name!r}{did_you_mean(name, self.backend_types)}; "
                f"known types: {known}; {_INSTALL}"
                + ("".join(["\n    plugins that failed and might provide it:", *failed]) if failed else "")
            )
        return found

    def require(self, name: str) -> None:
        """Return when the plugin ``name`` works.

        Raises:
            PluginError: it is not installed, or failed and why.
        """
        known = {report.name: report for report in self.reports}
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise PluginError(
                f"there is no plugin {name!r}{did_you_mean(name, known)}; known plugins: {names}; {_INSTALL}"
            )
        if known[name].error:
            raise PluginError(f"{known[name]} failed: {known[name].error}")

    def wrap(self, backend: Backend[Any], tier: TierInfo) -> Backend[Any]:
        """Offer ``backend`` to every plugin in turn; each gets what the one before it returned.

        Raises:
            PluginError: a plugin's hook raised or returned something else than a backend or ``None``.
        """
        for report, relay in self._having("offload_wrap_backend"):
            try:
                wrapped = call(relay.offload_wrap_backend, backend=backend, tier=tier)
            except FOREIGN_ERRORS as error:
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
        """The plugins that want to hear of events."""
        return tuple(
            Observer(report, partial(_notify, relay.offload_observe))
            for report, relay in self._having("offload_observe")
        )

    def _having(self, hook: str) -> list[LoadedPlugin]:
        return [plugin for plugin in self._plugins if hook in plugin.report.hooks]


def _notify(hook: Callable[..., object], event: Event) -> None:
    call(hook, event=event)


def load_plugins(points: Iterable[EntryPoint] | None = None) -> PluginRegistry:
    """Load all plugins, by default those of the installed distributions."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP) if points is None else points, key=lambda point: point.name)
    candidates = _without_copies(Candidate(point) for point in found)
    _refuse_shared(candidates, "the entry point name {!r} is used", lambda one: [one.point.name])
    # Loaded under two names, one module would wrap each backend twice.
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
        )
        types += provided
        reports.append(report)
        if candidate.error is None and candidate.relay is not None:
            plugins.append(LoadedPlugin(report, candidate.relay))
    return PluginRegistry(types, reports, plugins)


def _without_copies(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Leave out what one distribution that lies in two places of the search path says a second time."""
    unique: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        distribution = re.sub(r"[-_.]+", "-", candidate.distribution).lower()
        unique.setdefault((candidate.point.name, candidate.point.value, distribution), candidate)
    return list(unique.values())


def _refuse_shared(candidates: Sequence[Candidate], claim: str, names: Callable[[Candidate], Iterable[str]]) -> None:
    """Refuse all candidates that claim one name."""
    claims: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        for name in names(candidate):
            claims[name].append(candidate)
    for name, claimants in claims.items():
        if len(claimants) > 1:
            owners = sorted({claimant.owner for claimant in claimants})
            problem = (
                f"{claim.format(name)} by {' and '.join(owners)}; uninstall one of them"
                if len(owners) > 1
                else f"{claim.format(name)} more than once by {owners[0]}; its author must choose one"
            )
            for claimant in claimants:
                claimant.error = claimant.error or problem
