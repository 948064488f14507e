"""The reports of ``benchmarks.device_copies``: one of its copies, and one of its tokens per second."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.reporting.rows import DeviceCopies, DeviceCopy
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, RED, x_grid, y_grid
from benchmarks.reporting.tables import table

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "large copy to host, to device": ("bus to host", "bus to device"),
    "gather (µs)": ("gather",),
    "gather to host": ("gather to host",),
    "scatter (µs)": ("scatter",),
    "store, load": ("store", "load"),
    "vLLM's store, load": ("vLLM store", "vLLM load"),
}
BARS = {"gather to host": GREY, "scatter": GREEN, "store": BLUE, "load": ORANGE, "vLLM store": RED}
BAR = 0.16


def copies_table(results: DeviceCopies) -> str:
    """Return the speeds of all ways, with a row for each shape."""
    return table(
        ("GB/s: KiB x pages x objects", *COLUMNS),
        [
            (shape, *(_cell([rows[way] for way in ways if way in rows], column) for column, ways in COLUMNS.items()))
            for shape, rows in _by_shape(results).items()
        ],
    )


def _cell(rows: list[DeviceCopy], column: str) -> str:
    speeds = ", ".join(f"{row.gb_per_second_p50:.1f}" for row in rows)
    with_time = [row.engine_us_per_object for row in rows if row.engine_us_per_object is not None and "µs" in column]
    return speeds + "".join(f" ({time:.0f})" for time in with_time)


def _by_shape(results: DeviceCopies) -> dict[str, dict[str, DeviceCopy]]:
    shapes: dict[str, dict[str, DeviceCopy]] = {}
    for row in results.copies:
        shapes.setdefault(f"{row.page_kib:g} x {row.pages} x {row.objects}", {})[row.way] = row
    return shapes


def copies_finding(results: DeviceCopies) -> str:
    """Compare stores and loads with the bus."""
    best = {way: max(row.ratio for row in results.copies if row.way == way) for way in ("scatter", "store", "load")}
    return (
        f"On one {results.device} a scatter reaches {best['scatter']:.2f} of the bus; a store with its checksums "
        f"{best['store']:.2f}, and a load {best['load']:.2f}"
    )


def draw_copies(figure: Figure, results: DeviceCopies) -> None:
    """Draw a group of bars for each shape."""
    axes = figure.subplots()
    shapes = _by_shape(results)
    for number, (way, colour) in enumerate(BARS.items()):
        mine = [(place, rows[way]) for place, rows in enumerate(shapes.values()) if way in rows]
        places = [place + (number - (len(BARS) - 1) / 2) * BAR for place, _ in mine]
        axes.bar(places, [row.ratio for _, row in mine], BAR, color=colour, label=way)
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_xlabel("KiB of a page x pages of an object x objects")
    axes.set_ylabel("part of one large copy's speed")
    axes.set_ylim(0, 1)
    y_grid(axes)
    axes.legend(fontsize=7, ncols=len(BARS), loc="upper left")


def tokens_table(results: DeviceCopies) -> str:
    """Return the tokens per second of each engine."""
    return table(
        (
            "model, engine", "turns", "stored", "opted out", "stored / opted out", "to none: p10, p50, p90",
            "objects stored", "dropped",
        ),
        [
            (
                f"{row.model}, {row.name}",
                str(row.turns),
                f"{row.stored_p50:,.0f}",
                f"{row.opted_out_p50:,.0f}",
                f"{row.to_opted_out_p50:.3f}",
                f"{row.to_none_p10:.3f}, {row.to_none_p50:.3f}, {row.to_none_p90:.3f}",
                str(row.stored_objects),
                str(row.dropped_objects),
            )
            for row in results.tokens
        ],
    )  # fmt: skip


def tokens_finding(results: DeviceCopies) -> str:
    """Name the speed that remains when everything is stored."""
    costs = ", ".join(f"{row.to_none_p50:.3f} with {row.model}" for row in results.tokens if row.stored_objects)
    return f"On one {results.device}, an engine that stores all new prompts has this part of the speed without: {costs}"


def draw_tokens(figure: Figure, results: DeviceCopies) -> None:
    """Draw a bar for each engine, with a line from p10 to p90 of its ratio."""
    axes = figure.subplots()
    rows = results.tokens[::-1]
    axes.barh([f"{row.model}, {row.name}" for row in rows], [row.to_none_p50 for row in rows], color=BLUE, height=0.5)
    for place, row in enumerate(rows):
        axes.plot([row.to_none_p10, row.to_none_p90], [place, place], color="black", linewidth=1.2, marker="|")
        label = f"{row.to_none_p50:.3f}: {row.stored_p50:,.0f} tokens per second"
        axes.annotate(label, (row.to_none_p90, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.5)
    axes.set_xlabel("tokens per second, in relation to an engine without a connector (line: p10 to p90)")
    x_grid(axes)
