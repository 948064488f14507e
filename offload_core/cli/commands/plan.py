"""``offload-core plan``: the stored form of a model's KV cache, without the model and without an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload_core.api.errors import ConfigError, PlanError
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson
from offload_core.cli.output import note, print_json
from offload_core.cli.plan_report import PlanReport, plan_report
from offload_core.cli.session import EXIT_TROUBLE, EXIT_USAGE, read_config
from offload_core.config.geometry_file import KVCacheGeometry, load_geometry
from offload_core.config.model import OffloadSettings
from offload_core.memory.staging_size import staging_problem


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """A chunk size with which the engine would not start."""

    hybrid_chunk_size: int | None
    refusal: str


_Plan = PlanReport | _Refusal


@app.command()
def plan(
    geometry: Annotated[
        Path,
        typer.Argument(
            metavar="GEOMETRY",
            help="The model's KV cache groups, as a YAML, TOML or JSON file. An engine writes this file for its model "
            "if its configuration has the key geometry_file. The folder examples/geometries has examples.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="Plan with this configuration's hybrid_chunk_size, and check its staging_bytes too."),
    ] = None,
    chunk_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS",
            help="Plan with this hybrid_chunk_size instead. Repeat the option to compare several sizes.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the stored form of a model's KV cache: the objects of its groups, their number and their sizes.

    The command refuses a plan that the engine would refuse at its start, in the same words, with exit code 1.

    With several chunk sizes, the exit code is 1 if all of them are refused. It is 2 if a file is wrong.

    Example: `offload-core plan examples/geometries/gemma-3-4b.yaml`

    Example: `offload-core plan geometry.json --config offload.yaml`

    Example: `offload-core plan geometry.json --chunk-size 256 --chunk-size 1024 --json`
    """
    try:
        model = load_geometry(geometry)
        settings = None if config is None else read_config(config).settings
    except ConfigError as error:
        note(str(error))
        if as_json:
            print_json({"problems": list(error.problems)})
        raise typer.Exit(EXIT_USAGE) from None
    configured = model.hybrid_chunk_size if settings is None else settings.hybrid_chunk_size
    plans = [_plan(model, chunk, settings) for chunk in [*(chunk_size or ())] or [configured]]
    if as_json:
        documents = [dataclasses.asdict(item) for item in plans]
        print_json({"geometry": str(geometry), "model": model.model, "plans": documents})
    else:
        _print(model, plans)
    if all(isinstance(item, _Refusal) for item in plans):
        raise typer.Exit(EXIT_TROUBLE)


def _plan(model: KVCacheGeometry, hybrid_chunk_size: int | None, settings: OffloadSettings | None) -> _Plan:
    try:
        report = plan_report(model, hybrid_chunk_size)
    except PlanError as error:
        return _Refusal(hybrid_chunk_size, str(error))
    if settings is not None:
        largest = max(pack.payload_bytes for pack in report.packs)
        if problem := staging_problem(settings.staging_bytes, largest, report.hybrid_chunk_size, settings.staging_uses):
            return _Refusal(report.hybrid_chunk_size, problem)
    return report


def _print(model: KVCacheGeometry, plans: list[_Plan]) -> None:
    reports = [item for item in plans if isinstance(item, PlanReport)]
    console = Console(stderr=not reports, highlight=False, emoji=False)
    if len(plans) > 1 and reports:
        console.print(_comparison(reports))
        _say(console, _counted_over(reports))
    elif reports:
        _print_plan(console, model, reports[0])
    for item in plans:
        prefix = f"hybrid_chunk_size {item.hybrid_chunk_size}: " if len(plans) > 1 else ""
        if isinstance(item, _Refusal):
            _say(console, f"{prefix}refused: {item.refusal}")
        else:
            for warning in item.warnings:
                _say(console, f"{prefix}warning: {warning}")


def _print_plan(console: Console, model: KVCacheGeometry, report: PlanReport) -> None:
    if model.model:
        _say(console, f"model: {model.model}")
    _say(
        console,
        f"hybrid_chunk_size: {report.hybrid_chunk_size} tokens (default: {report.default_hybrid_chunk_size or 'none'})",
    )
    _say(
        console,
        f"boundaries: every {report.boundary_tokens:,} tokens; a prompt of {report.shortest_served_prompt_tokens:,} "
        "tokens is the shortest that can be loaded",
    )
    groups = _table("group", "block", "policy", "unit", "hashes", "blocks", "pack", "name")
    for group in report.groups:
        _row(
            groups,
            group.index,
            group.block_size_tokens,
            group.policy,
            group.unit_tokens,
            group.hash_factor,
            group.blocks_per_object,
            group.pack or "none: never needed",
            group.name,
        )
    console.print(groups)
    _say(console, "block and unit in tokens; hashes: block hashes per unit; blocks: of the group in each object")
    packs = _table("pack", "unit", "payload bytes", "objects / 1,000", "bytes / 1,000")
    for pack in report.packs:
        _row(
            packs,
            pack.name,
            pack.unit_tokens,
            pack.payload_bytes,
            f"{pack.objects_per_1000_tokens:.2f}",
            round(pack.bytes_per_1000_tokens),
        )
    packs.add_section()
    _row(packs, "total", "", "", f"{report.objects_per_1000_tokens:.2f}", round(report.bytes_per_1000_tokens))
    console.print(packs)
    _say(console, _counted_over([report]))
    if report.tail_objects:
        _say(
            console,
            f"tails: a prompt that ends inside a chunk has {report.tail_objects} more objects with "
            f"{report.tail_bytes:,} bytes, headers included",
        )


def _comparison(reports: list[PlanReport]) -> Table:
    table = _table("hybrid_chunk_size", "boundaries", "largest payload", "objects / 1,000", "bytes / 1,000")
    for report in reports:
        _row(
            table,
            report.hybrid_chunk_size,
            report.boundary_tokens,
            max(pack.payload_bytes for pack in report.packs),
            f"{report.objects_per_1000_tokens:.2f}",
            round(report.bytes_per_1000_tokens),
        )
    return table


def _counted_over(reports: list[PlanReport]) -> str:
    lengths = sorted({report.prompt_tokens for report in reports})
    ranks = f", on all {reports[0].ranks} ranks together" if reports[0].ranks > 1 else ""
    states = any(group.policy == "state" for group in reports[0].groups)
    return (
        f"objects and bytes with headers per 1,000 tokens of a prompt of {' or '.join(f'{n:,}' for n in lengths)} "
        f"tokens{ranks}"
        + ("; states at every boundary, of which the engine hands over those at which its steps end" * states)
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        text = column in ("policy", "pack", "name")
        table.add_column(column, justify="left" if text else "right", no_wrap=column != "name")
    return table


def _row(table: Table, *cells: Any) -> None:
    table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
