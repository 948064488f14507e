"""The report of ``benchmarks.placement``."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.reporting.rows import Placed, Placement
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, RED, y_grid
from benchmarks.reporting.tables import table

RULES = ("everything", "kept", "kept and spare", "stock's rule", "best possible")
COLOURS = dict(zip(RULES, (ORANGE, GREEN, BLUE, RED, GREY), strict=True))
SYNTHETIC = ("windows", "states")
"""The geometries of the plot."""
NOISE = 0.001
"""A difference in hit rate that means nothing."""

Cell = tuple[str, str, float | None]
"""Trace, geometry and capacity."""


def cells(results: Placement) -> dict[Cell, dict[str, Placed]]:
    """Return the runs by cell and rule."""
    found: dict[Cell, dict[str, Placed]] = {}
    for row in results.runs:
        found.setdefault((row.trace, row.geometry, row.capacity_gb), {})[row.rule] = row
    return found


def tables(results: Placement) -> str:
    """Return hit rates and bytes written, with a table for each trace."""
    traces = dict.fromkeys(row.trace for row in results.runs)
    return "\n\n".join(_table(results, trace) for trace in traces)


def _table(results: Placement, trace: str) -> str:
    columns = (f"`{trace}`: hit rate, TB written", "GB", *RULES, "kept and spare / best possible")
    return table(
        columns,
        [
            (
                geometry,
                "no limit" if capacity is None else f"{capacity:,.0f}",
                *(_shown(rules[rule]) for rule in RULES),
                f"{rules['kept and spare'].hit_rate / rules['best possible'].hit_rate:.2f}",
            )
            for (of, geometry, capacity), rules in cells(results).items()
            if of == trace
        ],
    )


def _shown(row: Placed) -> str:
    written = "" if row.written_tb is None else f", {row.written_tb:.3g}"
    return f"{row.hit_rate:.3f}{written}"


def worse(results: Placement) -> list[Cell]:
    """Return the cells in which the default placement serves less than the better of the two others."""
    return [
        cell
        for cell, rules in cells(results).items()
        if rules["kept and spare"].hit_rate < max(rules[rule].hit_rate for rule in ("everything", "kept")) - NOISE
    ]


def finding(results: Placement) -> str:
    """Name the number of cells in which the default placement serves most, and its bytes."""
    limited = [rules for (_, _, capacity), rules in cells(results).items() if capacity is not None]
    written = sorted(
        (rules["kept and spare"].written_tb or 0) / (rules["everything"].written_tb or 1) for rules in limited
    )
    count = len(cells(results))
    return (
        f"`kept and spare` serves at least as much as the better of the other two in {count - len(worse(results))} of "
        f"{count} cases, within 0.1 points; under a limit it writes {written[len(written) // 2]:.0%} of the bytes of "
        "`everything` (median)"
    )


def draw(figure: Figure, results: Placement) -> None:
    """Draw hit rates by capacity, with a panel for each trace and synthetic geometry."""
    traces = list(dict.fromkeys(row.trace for row in results.runs))
    panels = figure.subplots(len(SYNTHETIC), len(traces), squeeze=False)
    for geometry, line in zip(SYNTHETIC, panels, strict=True):
        for trace, axes in zip(traces, line, strict=True):
            rows = [row for row in results.runs if (row.trace, row.geometry) == (trace, geometry)]
            capacities = list(dict.fromkeys(row.capacity_gb for row in rows))
            for rule in RULES:
                rates = [row.hit_rate for row in rows if row.rule == rule]
                axes.plot(range(len(rates)), rates, "o-", color=COLOURS[rule], label=rule, markersize=3)
            labels = ["none" if capacity is None else f"{capacity:g}" for capacity in capacities]
            axes.set_xticks(range(len(capacities)), labels)
            axes.set_title(f"{trace}, {geometry}")
            axes.set_ylim(0, 1)
            y_grid(axes)
    for axes in panels[-1]:
        axes.set_xlabel("limit of capacity, GB")
    panels[0][0].set_ylabel("hit rate")
    panels[1][0].set_ylabel("hit rate")
    panels[0][0].legend(loc="lower right", fontsize=7)
