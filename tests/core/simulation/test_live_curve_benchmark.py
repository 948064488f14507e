"""The results of ``benchmarks.live_curve``: its rows, its table, its finding and its plot."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.live_curve import run_all
from benchmarks.reporting.reports.live_curve import differences, draw, finding, tables
from benchmarks.reporting.rows import LiveCurve
from tests.support.prompt_traces import conversations, trace_of, write_trace


def test_a_trace_gives_a_row_per_capacity_which_is_shown_and_drawn(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "small.jsonl", trace_of(conversations(3, 4, 1200), 256), header=False)
    rows = run_all(f"{trace}:256", "gpt-oss-20b")
    assert [(row.trace, row.geometry, len(row.estimated)) for row in rows] == [("small", "gpt-oss-20b", 4)] * 2
    assert max(abs(points) for row in rows for points in differences(row)) < 3
    changed = [row.model_copy(update={"estimated": [rate + 0.02 for rate in row.simulated]}) for row in rows]
    results = LiveCurve(runs=changed, memory_mib=27.6)
    assert "| gpt-oss-20b |" in tables(results)
    assert finding(results).startswith(
        "the largest of 8 differences between estimate and simulation is 2.0 points, and 0 are below 1 point; a curve "
        "takes at most 28 MiB, and "
    )
    figure = Figure()
    draw(figure, results)
    [axes] = figure.axes
    assert axes.get_lines()[0].get_label() == "small"
