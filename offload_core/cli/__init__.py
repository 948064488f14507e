"""The command ``offload-core``: looks after storage tiers without an engine.

One module per command. Each registers itself on :data:`offload_core.cli.application.app` when it is imported, so a new
command is a module and one more name in the import below.
"""

from __future__ import annotations

from offload_core.cli.application import app
from offload_core.cli.commands import bench, check, ls, plan, plugins, prune, schema, stats, verify

__all__ = ["app", "bench", "check", "ls", "plan", "plugins", "prune", "schema", "stats", "verify"]
