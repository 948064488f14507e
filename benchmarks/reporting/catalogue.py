"""Catalogue of the committed results: a table, a finding and a plot for each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.reporting import drawings, drawings_backends, findings, rows, tables
from benchmarks.reporting.document import RESULTS_FOLDER, ROOT, Document, read
from benchmarks.reporting.reports import device_copies, live_curve, placement
from benchmarks.reporting.style import drawn

DOCUMENT = ROOT / "docs" / "benchmarks.md"
PLOTS_FOLDER = ROOT / "docs" / "plots"


@dataclass(frozen=True)
class Entry:
    """A committed result.

    Args:
        name: the name of the result's file, its plot and its block in the document.
        results: the class of the results.
        table: makes the tables from the results.
        finding: makes the plot's title from the results.
        draw: draws the results.
        height: the height of the plot, in inches.
    """

    name: str
    results: type[Any]
    table: Callable[[Any], str]
    finding: Callable[[Any], str]
    draw: Callable[[Figure, Any], None]
    height: float

    @property
    def path(self) -> Path:
        """File of the results."""
        return RESULTS_FOLDER / f"{self.name}.json"

    @property
    def plot_path(self) -> Path:
        """File of the plot."""
        return PLOTS_FOLDER / f"{self.name}.svg"

    @property
    def source(self) -> str:
        """Name and digest of the results; a plot names its results by them."""
        return f"{self.path.relative_to(ROOT).as_posix()} sha256:{hashlib.sha256(self.path.read_bytes()).hexdigest()}"

    def read(self) -> Document[Any]:
        """Read the results.

        Raises:
            UnreadableResultsError: this version of the benchmarks cannot read the file.
        """
        return read(self.path, self.results)

    def plot(self) -> str:
        """Return the plot as SVG."""
        document = self.read()
        caption = f"{document.command} · {document.date:%Y-%m-%d} · {document.machine.sentence()}"
        title = self.finding(document.results).replace("`", "")
        return drawn(lambda figure: self.draw(figure, document.results), title, caption, self.height, self.source)

    def block(self) -> str:
        """Return the document's text about the results: command, machine, table and plot."""
        document = self.read()
        return "\n\n".join(
            (
                f"**Command:** `{document.command}`",
                f"**Machine:** {document.machine.sentence()}. Measured on {document.date:%Y-%m-%d}; "
                f"load average before the start {document.load_average_before:.1f}.",
                self.table(document.results),
                f"![{self.finding(document.results)}]({self.plot_path.relative_to(DOCUMENT.parent).as_posix()})",
            )
        )


CATALOGUE = (
    Entry("ttft", rows.Ttft, tables.ttft, findings.ttft, drawings.ttft, 3.2),
    Entry(
        "lmcache_connector", rows.LMCacheConnector, tables.lmcache_connector, findings.lmcache_connector,
        drawings.lmcache_connector, 2.8,
    ),
    Entry("crossover", rows.Crossover, tables.crossover, findings.crossover, drawings.crossover, 4.2),
    Entry("scheduler", rows.Scheduler, tables.scheduler, findings.scheduler, drawings.scheduler, 3.7),
    Entry("scheduler_own", rows.Scheduler, tables.scheduler, findings.scheduler, drawings.scheduler, 3.7),
    Entry("backends", rows.Backends, tables.backends, findings.backends, drawings_backends.backends, 8.5),
    Entry("cpu_memory", rows.CpuMemory, tables.cpu_memory, findings.cpu_memory, drawings_backends.cpu_memory, 4.0),
    Entry(
        "disk_capacity", rows.DiskCapacity, tables.disk_capacity, findings.disk_capacity,
        drawings_backends.disk_capacity, 3.4,
    ),
    Entry("disk_scan", rows.DiskScan, tables.disk_scan, findings.disk_scan, drawings_backends.disk_scan, 3.4),
    Entry("faults", rows.Faults, tables.faults, findings.faults, drawings.faults, 3.4),
    Entry("faults_breaker", rows.Faults, tables.faults_breaker, findings.faults_breaker, drawings.faults_breaker, 3.4),
    Entry(
        "faults_two_tiers", rows.Faults, tables.faults_two_tiers, findings.faults_two_tiers,
        drawings.faults_two_tiers, 2.8,
    ),
    Entry("codecs", rows.Codecs, tables.codecs, findings.codecs, drawings_backends.codecs, 3.6),
    Entry(
        "device_copies", rows.DeviceCopies, device_copies.copies_table, device_copies.copies_finding,
        device_copies.draw_copies, 3.4,
    ),
    Entry(
        "device_tokens", rows.DeviceCopies, device_copies.tokens_table, device_copies.tokens_finding,
        device_copies.draw_tokens, 1.9,
    ),
    Entry("placement", rows.Placement, placement.tables, placement.finding, placement.draw, 6.0),
    Entry("live_curve", rows.LiveCurve, live_curve.tables, live_curve.finding, live_curve.draw, 3.2),
)  # fmt: skip
