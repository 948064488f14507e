"""``offload-core advise``: a sentence on the capacity of each tier, from the metrics of a running engine."""

from __future__ import annotations

import typer

from offload_core.cli.advice import curves, hits_document, measured_hits
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, MetricsSource
from offload_core.cli.metrics_text import read_or_exit
from offload_core.cli.output import note, print_json
from offload_core.cli.session import EXIT_TROUBLE


@app.command()
def advise(metrics: MetricsSource, as_json: AsJson = False) -> None:
    """Advise on the capacity of each tier, from the estimates of a running engine.

    The engine estimates the hits of its latest prompts at half, twice and four times each tier's capacity. The
    estimates leave out the engine's own prefix cache, as offload-core simulate does.

    Exits with 1 if the metrics have no estimate, and with 2 if they cannot be read.

    Example: `offload-core advise http://localhost:8000/metrics`
    """
    samples = read_or_exit(metrics, as_json=as_json)
    found, measured = curves(samples), measured_hits(samples)
    if as_json:
        counted = hits_document(measured)
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
