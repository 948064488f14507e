"""The command ``offload-core``: looks after storage tiers without an engine."""

from __future__ import annotations

import typer

from offload_core.cli.plan import plan

app = typer.Typer(name="offload-core", no_args_is_help=True, help=__doc__, rich_markup_mode="rich")


@app.callback()
def main() -> None:
    """Look after the storage tiers of offload-core: see what is there, check it, measure it, clean up."""


app.command()(plan)
