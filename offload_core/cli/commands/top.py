"""``offload-core top``: a live view of the tiers of a running engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from prometheus_client.samples import Sample
from rich.console import Group
from rich.live import Live
from rich.text import Text

from offload_core.api.errors import ConfigError
from offload_core.cli.advice import MeasuredHits, hits_document, measured_hits
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, MetricsSource, duration_seconds
from offload_core.cli.engine_view import FIGURES, EngineView
from offload_core.cli.metrics_text import read_or_exit, read_samples
from offload_core.cli.output import make_table, note, print_json, print_table
from offload_core.cli.session import EXIT_INTERRUPTED, EXIT_TROUBLE, sigterm_interrupts

_LEAST_SECONDS = 0.1


def _interval(text: str) -> float:
    seconds = duration_seconds(text)
    if seconds < _LEAST_SECONDS:
        raise typer.BadParameter(f"{text!r} is too short; the shortest interval is 0.1s")
    return seconds


@app.command()
def top(
    metrics: MetricsSource,
    once: Annotated[bool, typer.Option("--once", help="show the figures since the engine's start, and end")] = False,
    interval: Annotated[
        float, typer.Option(parser=_interval, metavar="DURATION", help="time between two readings, such as 500ms or 5s")
    ] = "2s",  # type: ignore[assignment]  # typer parses it
    as_json: AsJson = False,
) -> None:
    """Show the tiers of a running engine: hits, tokens served, seconds saved, bytes, pauses and queues.

    The view is drawn anew after each interval, until Ctrl-C. Each tier has its figures since the engine's start, and
    beside them those of the last interval. Into a file or a pipe, each reading is printed below the one before. With
    --json there is one reading.

    Exits with 1 if there are no metrics of offload-core, or if the engine stops meanwhile. Exits with 2 if nothing can
    be read at first.

    Example: `offload-core top http://localhost:8000/metrics`
    """
    view, measured = _seen(read_or_exit(metrics, as_json=as_json))
    if as_json:
        counted = hits_document(measured)
        print_json({"metrics": metrics, "tiers": [tier.document() for tier in view.tiers], "measured": counted})
    if not view.tiers:
        note(
            f"{metrics}: there are no metrics of offload-core; a vLLM with HybridOffloadConnector and statistics shows "
            "them after its first request"
        )
        raise typer.Exit(EXIT_TROUBLE)
    if as_json:
        return
    if once or metrics == "-":
        print_table(*_table(view))
        return
    try:
        with sigterm_interrupts():  # or a killed command would leave the terminal without its text
            (_draw if sys.stdout.isatty() else _print)(metrics, interval, view, measured)
    except ConfigError as error:
        note(f"the engine has stopped, or does not answer: {error}")
        raise typer.Exit(EXIT_TROUBLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _seen(samples: Sequence[Sample]) -> tuple[EngineView, MeasuredHits]:
    """Return the view of metrics that were read just now, and the hits that vLLM has counted."""
    return EngineView.of(samples), measured_hits(samples)


def _print(metrics: str, interval: float, view: EngineView, _: MeasuredHits) -> None:
    """Print the figures since the engine's start, then those of each interval, until an error or an interrupt."""
    shown = view
    while True:
        print_table(*_table(shown))
        sys.stdout.flush()
        time.sleep(interval)
        before, (view, _) = view, _seen(read_samples(metrics))
        shown = view.since(before)


def _draw(metrics: str, interval: float, view: EngineView, measured: MeasuredHits) -> None:
    """Draw the table anew after each interval, until an error or an interrupt."""
    before: EngineView | None = None
    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            hits = f"vLLM: {measured[0]:.0%} hits in its own cache, {measured[1]:.0%} from tiers; " if measured else ""
            head = Text(f"{metrics}\n{hits}Ctrl-C ends\n", style="dim")
            screen.update(Group(head, make_table(*_table(view, before))), refresh=True)
            time.sleep(interval)
            before, (view, measured) = view, _seen(read_samples(metrics))


def _table(view: EngineView, before: EngineView | None = None) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the columns and the rows of a table: per tier its figures, and those from ``before`` on."""
    columns, figures = [""], [list(FIGURES)]
    changes = {} if before is None else {tier.name: tier for tier in view.since(before).tiers}
    for tier in view.tiers:
        columns.append(f"{tier.name}|")
        figures.append(tier.figures())
        if before is not None:
            columns.append(f"last {view.taken_at - before.taken_at:.1f} s|")
            figures.append(changes[tier.name].figures())
    return columns, list(zip(*figures, strict=True))
