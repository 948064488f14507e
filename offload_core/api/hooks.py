"""The hooks of offload-core and the version of its plugin API.

Hooks are synchronous, typed and never called per block. For each hook there is a heading in plugins.md, which is its
signature, and a test with its name. A plugin is a module that an entry point of the group ``offload_core`` names. It
states ``OFFLOAD_API_VERSION`` and marks its hooks with :data:`offload_core.api.hookimpl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from offload_core.api.backend import Backend, BackendType
from offload_core.api.events import Event

PROJECT_NAME = "offload_core"

API_VERSION = 1
"""The version of the plugin API: the hooks, their arguments, the contract in plugins.md and the public names.

A release that adds to the API raises this by one, so that a plugin can ask for the addition. A release that removes or
changes a part of the API raises :data:`OLDEST_API_VERSION` too.
"""

OLDEST_API_VERSION = 1
"""The oldest API version that this core serves. It loads plugins for this version up to :data:`API_VERSION`."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""The mark of a plugin's hooks. ``hookimpl(optionalhook=True)`` marks one that an older core may lack."""


@dataclass(frozen=True)
class TierInfo:
    """The tier of a backend that ``offload_wrap_backend`` is offered.

    Args:
        name: the tier's name in the configuration.
        type: the backend type that the configuration names.
        load_weight: the tier's weight when tiers compete for a load.
    """

    name: str
    type: str
    load_weight: float


class HookSpecs:
    """Namespace of the hook specifications."""

    @hookspec
    def offload_register_backends(self) -> Sequence[BackendType]:
        """Return the backend types that the plugin provides.

        Called on the thread that reads a configuration, each time that one is read. If it raises, the core uses no part
        of the plugin.
        """
        raise NotImplementedError  # a specification is never called

    @hookspec
    def offload_wrap_backend(self, backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
        """Return a backend around ``backend``, or ``None`` to leave it as it is.

        Called for each backend that is made, before ``open``; each plugin gets the backend that the plugin before it
        returned. Use :class:`offload_core.api.BackendWrapper`, which passes all calls on. By default, the hook runs in
        each I/O process.
        """
        raise NotImplementedError

    @hookspec
    def offload_observe(self, event: Event) -> None:
        """Receive an event of a tier.

        Called on one thread of its own, in the order of the events. A slow observer delays no tier: when too many
        events wait, the core drops new ones and counts them in ``events_dropped``. An error is logged once. By
        default, the hook runs in the I/O process.
        """
        raise NotImplementedError
