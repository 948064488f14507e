"""Plots of the benchmarks without an engine: backends, memory, folders, codecs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.reporting.rows import Backends, Codecs, CpuMemory, DiskCapacity, DiskScan, Speed
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, x_grid, y_grid
from benchmarks.reporting.tables import BACKEND_COLUMNS, ours, size

BAR = 0.27


def backends(figure: Figure, results: Backends) -> None:
    """Draw a panel for each medium and page size, with bars for ours, vLLM's helpers and the limit."""
    cells = list(dict.fromkeys((row.backend, row.medium, row.page_kib) for row in results.speed))
    panels = figure.subplots(-(-len(cells) // 2), 2, squeeze=False).flat
    for axes, cell in zip(panels, cells, strict=False):
        rows = [row for row in results.speed if (row.backend, row.medium, row.page_kib) == cell]
        groups = {
            "ours, with checksums": (BLUE, ours(rows)),
            "vLLM's helpers": (ORANGE, [row for row in rows if row.name.startswith("vLLM")]),
            "limit of the machine (one file; memcpy)": (GREY, [row for row in rows if row.name.startswith("limit")]),
        }
        shown = {label: group for label, group in groups.items() if group[1]}
        for number, (label, (colour, mine)) in enumerate(shown.items()):
            _bars(axes, mine, (number - (len(shown) - 1) / 2) * BAR, colour, label)
        axes.set_xticks(
            range(len(BACKEND_COLUMNS)), [f"{operation}\n{threads} thr." for operation, threads in BACKEND_COLUMNS]
        )
        backend, medium, kib = cell
        axes.set_title(f"{backend}{'' if medium == 'memory' else f', {medium}'}, pages of {size(kib)}")
        axes.set_ylabel("GB/s")
        axes.margins(y=0.18)
        y_grid(axes)
    figure.axes[0].legend(loc="upper left", fontsize=7)


def _bars(axes: Axes, rows: Sequence[Speed], shift: float, colour: str, label: str) -> None:
    speeds = {(row.operation, row.threads): row for row in rows}
    ordered = [speeds[column] for column in BACKEND_COLUMNS]
    places = np.arange(len(BACKEND_COLUMNS)) + shift
    lows, heights, highs = np.array(
        [(row.gb_per_second_p10, row.gb_per_second_p50, row.gb_per_second_p90) for row in ordered]
    ).T
    axes.bar(places, heights, BAR, color=colour, label=label)
    axes.vlines(places, lows, highs, color="#444444", linewidth=1)
    for place, height, high in zip(places, heights, highs, strict=True):
        axes.annotate(
            f"{height:.1f}", (place, high), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=6.5
        )


def cpu_memory(figure: Figure, results: CpuMemory) -> None:
    """Draw the ratios to memcpy, p10 to p90, with a panel each for an even and a fragmented tier."""
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    for axes, fragmented in zip(panels, (False, True), strict=True):
        rows = [row for row in reversed(results.copies) if row.fragmented is fragmented]
        for operation, colour in (("store", ORANGE), ("load", BLUE)):
            mine = [(place, row) for place, row in enumerate(rows) if row.operation == operation]
            ratios = np.array([row.ratio_p50 for _, row in mine])
            errors = np.array([[row.ratio_p50 - row.ratio_p10, row.ratio_p90 - row.ratio_p50] for _, row in mine]).T
            axes.errorbar(
                ratios, [place for place, _ in mine], xerr=errors.clip(min=0), fmt="o", color=colour, ecolor=GREY,
                capsize=2, label=operation,
            )  # fmt: skip
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title("fragmented tier" if fragmented else "tier of even objects")
        axes.set_xlabel("speed beside memcpy (p50, bar: p10 to p90)")
        x_grid(axes)
        labels = [f"{size(row.object_kib)}, {row.threads} thr., {row.operation}" for row in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlim(left=0)
    panels[0].legend(loc="best")


def disk_capacity(figure: Figure, results: DiskCapacity) -> None:
    """Draw stores with and without a capacity, and with each fsync policy."""
    left, right = figure.subplots(1, 2)
    places = np.arange(len(results.capacity))
    for shift, label, colour, heights in (
        (-0.2, "without a capacity", GREY, [row.without_mib_per_second for row in results.capacity]),
        (0.2, "with a capacity", BLUE, [row.with_mib_per_second for row in results.capacity]),
    ):
        bars = left.bar(places + shift, heights, 0.38, color=colour, label=label)
        left.bar_label(bars, [f"{height:,.0f}" for height in heights])
    left.set_xticks(places, [f"objects of {size(row.object_kib)}" for row in results.capacity])
    left.set_title(f"{results.capacity[0].processes} processes, one folder")
    left.legend(loc="upper right")
    bars = right.bar(
        [row.policy for row in results.fsync], [row.mib_per_second for row in results.fsync], 0.5, color=GREEN
    )
    right.bar_label(bars, [f"{row.mib_per_second:,.0f}" for row in results.fsync])
    right.set_title("one process, objects of 2 MiB, by fsync")
    for axes in (left, right):
        axes.set_ylabel("stored, MiB/s")
        axes.margins(y=0.4)
        y_grid(axes)


def disk_scan(figure: Figure, results: DiskScan) -> None:
    """Draw the percentiles of the calls during the scan."""
    axes = figure.subplots()
    names = ("p50", "p90", "p99", "max")
    places = np.arange(len(names))
    for row, shift, colour in zip(results.calls, (-0.2, 0.2), (BLUE, ORANGE), strict=True):
        heights = [row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms]
        bars = axes.bar(places + shift, heights, 0.38, color=colour, label=f"{row.operation} of {row.keys} keys")
        axes.bar_label(bars, [f"{height:.1f}" for height in heights])
    axes.set_xticks(places, names)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("duration of a call, ms")
    axes.margins(y=0.2)
    axes.legend(loc="upper left")
    y_grid(axes)


def codecs(figure: Figure, results: Codecs) -> None:
    """Draw a panel for the ratio and one for each speed, with a bar for each kind of values."""
    ways = list(dict.fromkeys((row.codec, row.level) for row in results.compression))[::-1]
    data = list(dict.fromkeys(row.data for row in results.compression))
    panels: Sequence[Axes] = figure.subplots(1, 3, sharey=True)
    measures = ("ratio", "encode_mb_per_second", "decode_mb_per_second")
    for axes, measure in zip(panels, measures, strict=True):
        for number, (name, colour) in enumerate(zip(data, (BLUE, ORANGE, GREEN), strict=False)):
            rows = {(row.codec, row.level): row for row in results.compression if row.data == name}
            widths = [getattr(rows[way], measure) or 0 for way in ways]
            shift = ((len(data) - 1) / 2 - number) * BAR
            axes.barh(np.arange(len(ways)) + shift, widths, BAR, color=colour, label=name)
        x_grid(axes)
    panels[0].set_yticks(range(len(ways)), [f"{codec}, {level}" for codec, level in ways])
    panels[0].set_ylabel("codec, level")
    panels[0].set_xlim(left=1)
    for axes, label in zip(panels, ("size before / after", "compress, MB/s", "decompress, MB/s"), strict=True):
        axes.set_xlabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", title="values")
