"""The command ``offload-core``: inspection and maintenance of storage tiers without an engine.

There is one module per command. Its import registers the command on :data:`offload_core.cli.application.app`. A new
command is therefore a module and one more name in the import below.
"""

from __future__ import annotations

from offload_core.cli.application import app
from offload_core.cli.commands import (
    advise,
    bench,
    check,
    ls,
    plan,
    plugins,
    prove,
    prune,
    schema,
    simulate,
    stats,
    top,
    verify,
)

__all__ = [
    "advise",
    "app",
    "bench",
    "check",
    "ls",
    "plan",
    "plugins",
    "prove",
    "prune",
    "schema",
    "simulate",
    "stats",
    "top",
    "verify",
]
