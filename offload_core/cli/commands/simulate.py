"""``offload-core simulate``: the hits and bytes of a tier on recorded prompts, by capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from offload_core.api.errors import ConfigError, PlanError
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, size
from offload_core.cli.curve_plot import Curve, Point, curve_plot
from offload_core.cli.output import human_bytes, note, print_json, print_table, progress
from offload_core.cli.session import EXIT_TROUBLE, EXIT_USAGE
from offload_core.config.geometry_file import KVCacheGeometry, load_geometry
from offload_core.objects.format import object_bytes
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.simulation.runs import Run, Subject, simulate_all
from offload_core.simulation.simulator import SimulationResult
from offload_core.simulation.trace import Trace, read_trace

_NO_LIMIT = "none"


class _Eviction(StrEnum):
    LRU = "lru"
    SLRU = "slru"


class _Placement(StrEnum):
    KEPT_AND_SPARE = "kept and spare"
    KEPT = "kept"
    EVERYTHING = "everything"


def _capacities(text: str) -> list[int | None]:
    """Parse capacities; each only once, in their order."""
    words = [word.strip() for word in text.split(",")]
    return list(dict.fromkeys(None if word == _NO_LIMIT else _capacity(word) for word in words))


def _capacity(word: str) -> int:
    try:
        capacity = size(word)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or none for no limit", param_hint="'--capacity'") from None
    if not capacity:
        raise typer.BadParameter(f"{word!r} holds no object; write a size such as 100GiB", param_hint="'--capacity'")
    return capacity


@app.command()
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="recorded prompts, as JSON lines (.jsonl or .jsonl.gz) in the layout of Mooncake's traces: "
            "input_length and hash_ids, an id per block of tokens",
        ),
    ],
    geometry: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="the model's KV cache groups, as for `offload-core plan`",
        ),
    ],
    capacity: Annotated[
        str, typer.Option(metavar="SIZES", help="capacities of the tier, such as 100GiB,200GiB,none; none is no limit")
    ] = _NO_LIMIT,
    placement: Annotated[
        list[_Placement] | None,
        typer.Option(
            metavar="PLACEMENT",
            help="objects to store: 'kept and spare' (the default), 'kept' or 'everything'; repeat the option to "
            "compare several",
        ),
    ] = None,
    eviction: Annotated[_Eviction, typer.Option(help="the tier's eviction")] = _Eviction.LRU,
    chunk_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="plan with this hybrid_chunk_size instead of the geometry's"),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="tokens per id of the trace; by default the number in its header, or 512 as in Mooncake's traces",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw the hit rates by capacity into this SVG file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a tier on recorded prompts: hit rate, bytes and evictions, by capacity.

    The planner, the placement and the order of eviction are those that serve. The tier begins without objects. Its
    capacity is for the objects of all ranks together.

    The engine's own prefix cache is left out, so the real tier serves fewer tokens. Generated tokens are left out too.

    Exits with 1 if no request of the trace can be simulated, and with 2 if a file or an option is wrong.

    Example: `offload-core simulate trace.jsonl.gz --geometry geometry.json --capacity 100GiB,200GiB,400GiB,none`
    """
    capacities = _capacities(capacity)
    try:
        model = load_geometry(geometry)
        prompts = read_trace(trace, block_tokens)
        planner = model.planner(chunk_size or model.hybrid_chunk_size)
    except (ConfigError, PlanError) as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(getattr(error, "problems", [str(error)]))})
        raise typer.Exit(EXIT_USAGE) from None
    for warning in planner.warnings:
        note(f"warning: {warning}")
    placements = dict.fromkeys(placement or [_Placement.KEPT_AND_SPARE])
    runs = [Run(one.value, limit) for one in placements for limit in capacities]
    results = _simulated(Subject(prompts, planner, _stored_bytes(model, planner), eviction.value), runs)
    if refused := results[0].refused_requests:
        note(f"{refused} requests are longer than max_model_len = {planner.max_model_len} and were left out")
    if as_json:
        print_json(_document(trace, geometry, prompts, planner, runs, results, eviction))
    else:
        columns = ("placement", "capacity|", "hit rate|", "written|", "read|", "evicted|", "objects evicted|", "peak|")
        print_table(columns, map(_row, runs, results))
    if plot is not None:
        _draw(plot, f"{trace.name}, {model.model or geometry.name}", runs, results)
    if not results[0].requests:
        raise typer.Exit(EXIT_TROUBLE)


def _simulated(subject: Subject, runs: Sequence[Run]) -> list[SimulationResult]:
    with progress(quiet=False) as bar:
        task = bar.add_task("requests", total=len(runs) * len(subject.trace.requests))
        return simulate_all(subject, runs, lambda served: bar.update(task, completed=served))


def _stored_bytes(model: KVCacheGeometry, planner: HybridOffloadPlanner) -> dict[str, int]:
    """Return the bytes of one object of each pack, with its header, on all ranks together."""
    return {pack.name: object_bytes(model.payload_bytes(pack)) * model.ranks for pack in planner.packs}


def _row(run: Run, result: SimulationResult) -> list[object]:
    traffic = result.traffic
    return [
        run.placement,
        _label(run.capacity_bytes),
        f"{result.hit_rate:.1%}",
        *map(human_bytes, (traffic.written_bytes, traffic.read_bytes, traffic.evicted_bytes)),
        f"{traffic.evicted_objects:,}",
        human_bytes(traffic.peak_bytes),
    ]


def _label(capacity_bytes: int | None) -> str:
    return "no limit" if capacity_bytes is None else human_bytes(capacity_bytes)


def _document(
    trace: Path,
    geometry: Path,
    prompts: Trace,
    planner: HybridOffloadPlanner,
    runs: Sequence[Run],
    results: Sequence[SimulationResult],
    eviction: _Eviction,
) -> dict[str, object]:
    return {
        "trace": str(trace),
        "geometry": str(geometry),
        "hybrid_chunk_size": planner.hybrid_chunk_size,
        "block_tokens": prompts.block_tokens,
        "requests": results[0].requests,
        "refused_requests": results[0].refused_requests,
        "input_tokens": results[0].input_tokens,
        "eviction": eviction.value,
        "runs": [
            {
                "placement": run.placement,
                "capacity_bytes": run.capacity_bytes,
                "hit_rate": result.hit_rate,
                "hit_tokens": result.hit_tokens,
                **dataclasses.asdict(result.traffic),
            }
            for run, result in zip(runs, results, strict=True)
        ],
    }


def _draw(path: Path, title: str, runs: Sequence[Run], results: Sequence[SimulationResult]) -> None:
    curves: dict[str, list[Point]] = {}
    for run, result in zip(runs, results, strict=True):
        point = Point(run.capacity_bytes, _label(run.capacity_bytes), result.hit_rate)
        curves.setdefault(run.placement, []).append(point)
    try:
        path.write_text(curve_plot(title, [Curve(name, points) for name, points in curves.items()]))
    except OSError as error:
        note(f"--plot: {error}")
        raise typer.Exit(EXIT_TROUBLE) from None
