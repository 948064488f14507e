"""The hooks of offload-core. Each has a heading in plugins.md and a test named after it.

Hooks are synchronous, typed and called when an engine starts, never per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from offload_core.backend import BackendType

PROJECT_NAME = "offload_core"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


class HookSpecs:
    """Namespace of the hook specifications."""

    @hookspec
    def offload_register_backends(self) -> Sequence[BackendType]:
        """Return the backend types that the plugin provides."""
        raise NotImplementedError  # a specification is never called
