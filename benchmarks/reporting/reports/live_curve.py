"""The report of ``benchmarks.live_curve``."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.reporting.rows import Estimate, LiveCurve
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, y_grid
from benchmarks.reporting.tables import table

FACTORS = ("0.5 x", "1 x", "2 x", "4 x")
AIM_POINTS = 3
"""The largest difference that the project allows, in points of 1 %."""


def tables(results: LiveCurve) -> str:
    """Return simulated and estimated hit rates, with a table for each trace."""
    traces = dict.fromkeys(row.trace for row in results.runs)
    return "\n\n".join(_table(results, trace) for trace in traces)


def _table(results: LiveCurve, trace: str) -> str:
    columns = (f"`{trace}`: simulated, estimated", "GB", *FACTORS, "largest difference, points", "sampled", "µs")
    return table(
        columns,
        [
            (
                row.geometry,
                f"{row.capacity_gb:,.0f}",
                *(f"{true:.3f}, {found:.3f}" for true, found in zip(row.simulated, row.estimated, strict=True)),
                f"{max(map(abs, differences(row))):.1f}",
                f"{row.sampled_share:.1%}",
                f"{row.us_per_request:,.0f}",
            )
            for row in results.runs
            if row.trace == trace
        ],
    )


def differences(row: Estimate) -> list[float]:
    """Return the estimated hit rates minus the simulated ones, in points of 1 %."""
    return [100 * (found - true) for true, found in zip(row.simulated, row.estimated, strict=True)]


def finding(results: LiveCurve) -> str:
    """Name the largest difference, the memory and the time."""
    every = [abs(points) for row in results.runs for points in differences(row)]
    times = sorted(row.us_per_request for row in results.runs)
    return (
        f"the largest of {len(every)} differences between estimate and simulation is {max(every):.1f} points, and "
        f"{sum(points < 1 for points in every)} are below 1 point; a curve takes at most {results.memory_mib:.0f} MiB, "
        f"and {times[len(times) // 2]:,.0f} µs per request (median)"
    )


def draw(figure: Figure, results: LiveCurve) -> None:
    """Draw the differences by simulated hit rate, with the traces in colours."""
    axes = figure.subplots()
    traces = dict.fromkeys(row.trace for row in results.runs)
    for trace, colour in zip(traces, (BLUE, ORANGE, GREEN), strict=False):
        rows = [row for row in results.runs if row.trace == trace]
        rates = [rate for row in rows for rate in row.simulated]
        axes.plot(
            rates, [one for row in rows for one in differences(row)], "o", color=colour, label=trace, markersize=3
        )
    for limit in (-AIM_POINTS, AIM_POINTS):
        axes.axhline(limit, color=GREY, linestyle="--")
    axes.set_xlabel("simulated hit rate")
    axes.set_ylabel("estimate minus simulation, points")
    axes.set_xlim(0, 1)
    y_grid(axes)
    axes.legend(fontsize=7)
