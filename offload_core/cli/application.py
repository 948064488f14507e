"""The application that every command module registers its commands on."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="offload-core",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,  # they may hold secrets
)


@app.callback()
def main() -> None:
    """Look after the storage tiers of offload-core: see what is there, check it, measure it, clean up.

    No engine is needed, and one may run meanwhile. Results go to stdout, everything else to stderr.

    Start with `offload-core plugins` and `offload-core check offload.yaml`.

    Exit codes:

    - 0: everything is fine
    - 1: a tier or an object is not; the rest was done all the same
    - 2: the command line or the configuration is wrong; nothing was done
    - 130: interrupted; what the command had written was removed
    """
