"""Plots of the engine's benchmarks: first tokens, lookups, faulty tiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.reporting.rows import Crossover, Faults, FaultyFirstToken, LMCacheConnector, Scheduler, Ttft
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, RED, x_grid, y_grid
from benchmarks.reporting.tables import cold_lookups, tokens

PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
"""Format of numbers on a logarithmic axis: plain, not as powers."""


def ttft(figure: Figure, results: Ttft) -> None:
    """Draw a bar to the median and a line to p99 for each way to the first token, except recompute while storing."""
    axes = figure.subplots()
    rows = sorted((row for row in results.first_tokens if "storing" not in row.name), key=lambda row: -row.p50_ms)
    colours = [BLUE if row.name.startswith("disk") else GREY for row in rows]
    axes.barh([row.name for row in rows], [row.p50_ms for row in rows], color=colours, height=0.6)
    for place, row in enumerate(rows):
        axes.plot([row.p50_ms, row.p99_ms], [place, place], color="black", linewidth=1.2, marker="|", markersize=7)
        label = f"{row.p50_ms:,.0f} ms ({row.ratio:.2f})"
        axes.annotate(label, (row.p99_ms, place), xytext=(6, 0), textcoords="offset points", va="center")
    _log_x(axes)
    axes.set_xlim(10, 6 * max(row.p99_ms for row in rows))
    axes.set_xlabel(
        f"time to first token, ms, prompts of {results.prompt_tokens:,} tokens\n"
        "bar: p50, line: to p99; in brackets: p50 beside the local prefix cache"
    )


def lmcache_connector(figure: Figure, results: LMCacheConnector) -> None:
    """Draw a panel for each model, with a bar to the median and a line to p99 for each cache."""
    models = list(dict.fromkeys(row.model for row in results.first_tokens))
    panels: Sequence[Axes] = np.atleast_1d(figure.subplots(1, len(models))).tolist()
    for axes, model in zip(panels, models, strict=True):
        rows = [row for row in results.first_tokens if row.model == model and row.served_tokens][::-1]
        names = [row.name if row.transfer_mode is None else f"{row.name},\n{row.transfer_mode}" for row in rows]
        colours = [BLUE if row.is_ours else GREY for row in rows]
        axes.barh(names, [row.p50_ms for row in rows], color=colours, height=0.6)
        for place, row in enumerate(rows):
            axes.plot([row.p50_ms, row.p99_ms], [place, place], color="black", linewidth=1.2, marker="|", markersize=7)
            load = "" if row.load_ms is None else f" (+{row.load_ms:,.0f})"
            label = f"{row.p50_ms:,.0f} ms{load}"
            axes.annotate(label, (row.p99_ms, place), xytext=(6, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, 2 * max(row.p99_ms for row in rows))
        axes.set_title(model)
        axes.set_xlabel("time to first token (load), ms\nbar: p50, line: to p99")


def crossover(figure: Figure, results: Crossover) -> None:
    """Draw a panel for each speed of the link, with a line for each latency and a dashed one for compute."""
    speeds = sorted({row.mb_per_second for row in results.rows})
    panels: Sequence[Axes] = np.atleast_1d(figure.subplots(1, len(speeds), sharey=True)).tolist()
    for axes, speed in zip(panels, speeds, strict=True):
        mine = [row for row in results.rows if row.mb_per_second == speed]
        latencies = sorted({row.latency_ms for row in mine})
        for latency, colour in zip(latencies, (GREEN, BLUE, ORANGE, RED), strict=False):
            rows = [row for row in mine if row.latency_ms == latency]
            lengths = [row.tokens for row in rows]
            axes.plot(lengths, [row.load_p50_ms for row in rows], color=colour, ls=":", label=f"load, {latency:g} ms")
            axes.plot(
                lengths, [row.ours_p50_ms for row in rows], color=colour, marker="o", label=f"ours, {latency:g} ms"
            )
        rows = [row for row in mine if row.latency_ms == latencies[0]]
        compute = [float(np.median([row.compute_p50_ms for row in mine if row.tokens == one.tokens])) for one in rows]
        axes.plot([row.tokens for row in rows], compute, color=GREY, ls="--", label="compute")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([row.tokens for row in rows], [f"{row.tokens:,}" for row in rows])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_title(f"{speed:,.0f} MB/s")
        axes.set_xlabel("tokens of the prompt")
        y_grid(axes)
    panels[0].set_ylabel("first token, p50, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")


def scheduler(figure: Figure, results: Scheduler) -> None:
    """Draw a panel for each geometry, with a line for each half."""
    rows = cold_lookups(results)
    geometries = list(dict.fromkeys(row.geometry for row in rows))
    panels: Sequence[Axes] = figure.subplots(1, len(geometries), sharey=True)
    for axes, geometry in zip(panels, geometries, strict=True):
        mine = [row for row in rows if row.geometry == geometry]
        lengths = [row.tokens for row in mine]
        axes.plot(lengths, [row.stock_p50_us for row in mine], color=GREY, marker="s", label="stock connector")
        axes.plot(lengths, [row.engine_p50_us for row in mine], color=BLUE, marker="o", label="ours, engine's thread")
        if results.medium == "shared":
            answers = [row.ours_p50_us for row in mine]
            axes.plot(lengths, answers, color=BLUE, marker="o", mfc="white", ls="--", label="ours, until the answer")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [tokens(length) for length in lengths])
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_title(geometry.replace(", ", "\n", 1))
        axes.set_xlabel("tokens of the prompt")
        axes.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
        y_grid(axes)
    panels[0].set_ylabel("first lookup, p50, µs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")


def faults(figure: Figure, results: Faults) -> None:
    """Draw a panel for each kind of request, with a range from the median to p99 for each state."""
    kinds = list(dict.fromkeys(row.kind for row in results.first_tokens))
    panels: Sequence[Axes] = figure.subplots(1, len(kinds), sharey=True)
    for axes, kind in zip(panels, kinds, strict=True):
        rows = [row for row in reversed(results.first_tokens) if row.kind == kind]
        axes.barh([row.state for row in rows], [row.p50_ms for row in rows], color=list(map(_colour, rows)), height=0.6)
        for place, row in enumerate(rows):
            axes.plot([row.p50_ms, row.p99_ms], [place, place], color="black", linewidth=1.2, marker="|", markersize=7)
            axes.annotate(
                f"{row.p50_ms:.0f}", (row.p99_ms, place), xytext=(5, 0), textcoords="offset points", va="center"
            )
        _log_x(axes)
        axes.set_title(f"prompt is {kind}")
        axes.set_xlabel("first token, ms (to p99)")
        axes.set_xlim(5, 2.2 * max(row.p99_ms for row in results.first_tokens))
    panels[0].set_ylabel("state of the second tier")


def _colour(row: FaultyFirstToken) -> str:
    if row.state.startswith("without"):
        return GREY
    return {"healthy": GREEN, "slow": ORANGE, "hung": RED}.get(row.state, BLUE)


def faults_breaker(figure: Figure, results: Faults) -> None:
    """Draw the ratios of the open breaker with their intervals, and the aim."""
    axes = figure.subplots()
    rows = results.breaker[::-1]
    labels = [f"{row.kind}, p{row.percent}" for row in rows]
    ratios = np.array([row.ratio for row in rows])
    errors = np.array([[row.ratio - row.low, row.high - row.ratio] for row in rows]).T.clip(min=0)
    axes.errorbar(ratios, range(len(rows)), xerr=errors, fmt="o", color=BLUE, ecolor=GREY, capsize=3)
    axes.set_yticks(range(len(rows)), labels)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(rows[0].aim, color=RED, linewidth=0.8, linestyle="--")
    axes.set_xlabel(
        "time to first token with the breaker open, beside no tier\n"
        f"bar: 95 % of resamplings; dashed line: the aim, at most {rows[0].aim:g}"
    )
    x_grid(axes)


def faults_two_tiers(figure: Figure, results: Faults) -> None:
    """Draw the throughput of the healthy tier in each state."""
    axes = figure.subplots()
    rows = results.two_tiers[::-1]
    colours = [GREY if row.aim is None else BLUE for row in rows]
    axes.barh([row.state for row in rows], [row.tokens_per_second for row in rows], color=colours, height=0.6)
    for place, row in enumerate(rows):
        label = f"{row.ratio:.2f} (quarters: {row.slice_ratio_min:.2f} to {row.slice_ratio_max:.2f})"
        axes.annotate(label, (row.tokens_per_second, place), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.45 * max(row.tokens_per_second for row in rows))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("tokens per second that the healthy tier serves, p50 (label: ratio to it alone)")
    x_grid(axes)


def _log_x(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(PLAIN)
    x_grid(axes)
