"""``offload-core advise``: a sentence on the capacity of each tier, from the metrics of a running engine."""

from __future__ import annotations

from typing import Annotated

import typer

from offload_core.api.errors import ConfigError
from offload_core.cli.advice import curves, measured_hits
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson
from offload_core.cli.metrics_text import read_samples
from offload_core.cli.output import note, print_json
from offload_core.cli.session import EXIT_TROUBLE, EXIT_USAGE


@app.command()
def advise(
    metrics: Annotated[
        str,
        typer.Argument(
            metavar="METRICS",
            help="the address of a running vLLM, such as http://localhost:8000/metrics, a file with its answer, or - "
            "for the standard input",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Advise on the capacity of each tier, from the estimates of a running engine.

    The engine estimates the hits of its latest prompts at half, twice and four times each tier's capacity. The
    estimates leave out the engine's own prefix cache, as offload-core simulate does.

    Exits with 1 if the metrics have no estimate, and with 2 if they cannot be read.

    Example: `offload-core advise http://localhost:8000/metrics`
    """
    try:
        samples = read_samples(metrics)
    except ConfigError as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(error.problems)})
        raise typer.Exit(EXIT_USAGE) from None
    found, measured = curves(samples), measured_hits(samples)
    if as_json:
        own, external = measured or (None, None)
        counted = {"own_hit_ratio": own, "external_hit_ratio": external}
        print_json({"metrics": metrics, "tiers": [curve.document() for curve in found], "measured": counted})
    else:
        for curve in found:
            typer.echo(f"{curve.title}: {curve.estimates} {curve.advice}")
        if found and measured:
            typer.echo(f"vLLM has counted: {measured[0]:.0%} hits in its own cache, and {measured[1]:.0%} from tiers.")
    if not found:
        note(
            f"{metrics}: no tier has an estimate; that needs a tier with a capacity, placement other than everything, "
            "and a vLLM that runs with this version of offload-core and its statistics"
        )
        raise typer.Exit(EXIT_TROUBLE)
