"""``offload-core simulate``: the hits and bytes of tiers on recorded prompts, by capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from offload_core.api.errors import ConfigError, PlanError
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, size
from offload_core.cli.curve_plot import Curve, Point, curve_plot
from offload_core.cli.output import human_bytes, note, print_json, print_table, progress
from offload_core.cli.session import EXIT_TROUBLE, EXIT_USAGE, read_config
from offload_core.config.geometry_file import KVCacheGeometry, load_geometry
from offload_core.config.model import OffloadConfig
from offload_core.objects.format import object_bytes
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.simulation.runs import Run, Subject, TierRules, simulate_all
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
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="simulate the tiers, the placement and the chunk size of this configuration, in place of one tier",
        ),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="with --config: the tier that --capacity is for; by default the last one"),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="capacities of the tier, such as 100GiB,200GiB,none; none is no limit (the default without --config)",
        ),
    ] = None,
    placement: Annotated[
        list[_Placement] | None,
        typer.Option(
            metavar="PLACEMENT",
            help="objects to store: 'kept and spare', 'kept' or 'everything'; repeat the option to compare several; by "
            "default that of the configuration, or 'kept and spare'",
        ),
    ] = None,
    eviction: Annotated[
        _Eviction | None, typer.Option(help="the tier's eviction, without --config; by default lru")
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="plan with this hybrid_chunk_size instead of the geometry's"),
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
    """Simulate a tier, or those of a configuration, on recorded prompts: hit rate, bytes and evictions, by capacity.

    The planner, the placement, the write policies and the order of eviction are those that serve. The tiers begin
    without objects. A capacity is for the objects of all ranks together.

    The engine's own prefix cache is left out, so the real tier serves fewer tokens. Generated tokens are left out too.

    Exits with 1 if no request of the trace can be simulated, and with 2 if a file or an option is wrong.

    With several tiers, the tier with the highest matched tokens times `load_weight` serves, because a trace has no
    times of loads. A tier's hit rate counts the tokens that it serves.

    Example: `offload-core simulate trace.jsonl.gz --geometry geometry.json --capacity 100GiB,200GiB,400GiB,none`
    """
    capacities = None if capacity is None else _capacities(capacity)
    if tier is not None and config is None:
        raise typer.BadParameter("it names a tier of a configuration; add --config FILE", param_hint="'--tier'")
    if eviction is not None and config is not None:
        raise typer.BadParameter("the tiers of --config have their own; change it there", param_hint="'--eviction'")
    try:
        settings = None if config is None else read_config(config)
        model = load_geometry(geometry)
        prompts = read_trace(trace, block_tokens)
        chunk_tokens = chunk_size or (settings and settings.settings.hybrid_chunk_size) or model.hybrid_chunk_size
        # A trace has no names for the ends of prompts inside a chunk.
        planner = model.model_copy(update={"tails": False}).planner(chunk_tokens)
    except (ConfigError, PlanError) as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(getattr(error, "problems", [str(error)]))})
        raise typer.Exit(EXIT_USAGE) from None
    for warning in planner.warnings:
        note(f"warning: {warning}")
    if settings is not None:
        _note_left_out(settings)
    configured = _Placement.KEPT_AND_SPARE if settings is None else _Placement(settings.settings.placement)
    tiers, varied = (
        ((TierRules(eviction=(eviction or _Eviction.LRU).value),), 0)
        if settings is None
        else _configured_tiers(settings, tier)
    )
    stacks = [tiers] if capacities is None else [_with_capacity(tiers, varied, limit) for limit in capacities]
    placements = dict.fromkeys(placement or [configured])
    runs = [Run(one.value, stack) for one in placements for stack in stacks]
    results = _simulated(Subject(prompts, planner, _stored_bytes(model, planner)), runs)
    if refused := results[0].refused_requests:
        note(f"{refused} requests are longer than max_model_len = {planner.max_model_len} and were left out")
    if as_json:
        print_json(_document(trace, geometry, prompts, planner, runs, results))
    else:
        columns = ("capacity|", "hit rate|", "written|", "read|", "evicted|", "objects evicted|", "peak|")
        first = ("placement", "tier") if len(tiers) > 1 else ("placement",)
        print_table(
            (*first, *columns), (row for run, result in zip(runs, results, strict=True) for row in _rows(run, result))
        )
    if plot is not None:
        _draw(plot, f"{trace.name}, {model.model or geometry.name}", runs, results, varied)
    if not results[0].requests:
        raise typer.Exit(EXIT_TROUBLE)


def _configured_tiers(config: OffloadConfig, name: str | None) -> tuple[tuple[TierRules, ...], int]:
    """Return the tiers of a configuration, and the place of the one whose capacity varies."""
    tiers = tuple(
        TierRules(
            name=one.common.name,
            capacity_bytes=one.capacity_bytes,
            eviction=one.eviction,
            write_policy=one.common.write_policy,
            promote=one.common.promote,
            load_weight=one.common.load_weight,
            low_watermark=low,
            high_watermark=high,
        )
        for one in config.tiers
        for low, high in [one.watermarks]
    )
    names = [one.name for one in tiers]
    if name is not None and name not in names:
        raise typer.BadParameter(f"there is no tier {name!r}; the tiers are {', '.join(names)}", param_hint="'--tier'")
    return tiers, len(tiers) - 1 if name is None else names.index(name)


def _note_left_out(config: OffloadConfig) -> None:
    for tier in config.tiers:
        keys = ["compression"] if tier.common.compression != "none" else []
        keys += ["keep_free"] if getattr(tier.options, "keep_free", 0) else []
        if keys:
            note(f"tier {tier.common.name}: {' and '.join(keys)} left out of the simulation")


def _with_capacity(tiers: tuple[TierRules, ...], place: int, capacity: int | None) -> tuple[TierRules, ...]:
    return (*tiers[:place], tiers[place]._replace(capacity_bytes=capacity), *tiers[place + 1 :])


def _simulated(subject: Subject, runs: Sequence[Run]) -> list[SimulationResult]:
    with progress(quiet=False) as bar:
        task = bar.add_task("requests", total=len(runs) * len(subject.trace.requests))
        return simulate_all(subject, runs, lambda served: bar.update(task, completed=served))


def _stored_bytes(model: KVCacheGeometry, planner: HybridOffloadPlanner) -> dict[str, int]:
    """Return the bytes of one object of each pack, with its header, on all ranks together."""
    return {pack.name: object_bytes(model.payload_bytes(pack)) * model.ranks for pack in planner.packs}


def _rows(run: Run, result: SimulationResult) -> Iterator[list[object]]:
    """Yield a row for each tier."""
    for tier in run.tiers:
        counts = result.tiers[tier.name]
        traffic = counts.traffic
        yield [
            run.placement,
            *([tier.name] if len(run.tiers) > 1 else []),
            _label(tier.capacity_bytes),
            f"{counts.hit_tokens / max(1, result.input_tokens):.1%}",
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
) -> dict[str, object]:
    return {
        "trace": str(trace),
        "geometry": str(geometry),
        "hybrid_chunk_size": planner.hybrid_chunk_size,
        "block_tokens": prompts.block_tokens,
        "requests": results[0].requests,
        "refused_requests": results[0].refused_requests,
        "input_tokens": results[0].input_tokens,
        "runs": [
            {
                "placement": run.placement,
                "hit_rate": result.hit_rate,
                "hit_tokens": result.hit_tokens,
                "tiers": [
                    {
                        "tier": tier.name,
                        "capacity_bytes": tier.capacity_bytes,
                        "eviction": tier.eviction,
                        "hit_tokens": result.tiers[tier.name].hit_tokens,
                        **dataclasses.asdict(result.tiers[tier.name].traffic),
                    }
                    for tier in run.tiers
                ],
            }
            for run, result in zip(runs, results, strict=True)
        ],
    }


def _draw(path: Path, title: str, runs: Sequence[Run], results: Sequence[SimulationResult], varied: int) -> None:
    """Draw the hit rates of all tiers together, by the capacity of the tier that varies."""
    curves: dict[str, list[Point]] = {}
    for run, result in zip(runs, results, strict=True):
        capacity_bytes = run.tiers[varied].capacity_bytes
        point = Point(capacity_bytes, _label(capacity_bytes), result.hit_rate)
        curves.setdefault(run.placement, []).append(point)
    try:
        path.write_text(curve_plot(title, [Curve(name, points) for name, points in curves.items()]))
    except OSError as error:
        note(f"--plot: {error}")
        raise typer.Exit(EXIT_TROUBLE) from None
