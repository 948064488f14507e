"""The hooks of offload-core and the version of what plugins build on.

Hooks are synchronous, typed and never called per block. Each has a heading in plugins.md, which is its signature, and a
test named after it. A plugin is a module that an entry point of the group ``offload_core`` names; it states
``OFFLOAD_API_VERSION`` and marks its hooks with :data:`hookimpl`.
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
"""What this core offers to plugins: its hooks, their arguments, the contract in plugins.md and the public modules.

One higher with every release that adds to them, so that a plugin which needs the addition can say so. What plugins
rely on is taken away or changed only together with raising :data:`OLDEST_API_VERSION`.
"""

OLDEST_API_VERSION = 1
"""The oldest version that this core still serves: plugins written for one from here to :data:`API_VERSION` load."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True)
class TierInfo:
    """What a wrapper may want to know of the tier whose backend it is offered.

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
        """Return the backend types that the plugin provides."""
        raise NotImplementedError  # a specification is never called

    @hookspec
    def offload_wrap_backend(self, backend: Backend[Any], tier: TierInfo) -> Backend[Any] | None:
        """Return a backend around ``backend``, or ``None``."""
        raise NotImplementedError

    @hookspec
    def offload_observe(self, event: Event) -> None:
        """Take note of what happened to a tier."""
        raise NotImplementedError
