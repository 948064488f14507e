"""The application on which every command module registers its command."""

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
    """Inspect and maintain the storage tiers of offload-core: list and check objects, measure tiers, clean up.

    Only `prove` starts engines. An engine may run beside all other commands. Results go to stdout, all other output to
    stderr.

    Start with `offload-core plugins` and `offload-core check offload.yaml`.

    Exit codes:

    - 0: success
    - 1: a tier or an object has a problem; the command did the rest of its work
    - 2: the command line or the configuration is wrong; the command did nothing
    - 130: interrupted; the command removed the objects that it had written
    """
