"""Draws the dashboard of ``examples/monitoring`` with the numbers of a served engine, by a real Prometheus.

An API server has a small Gemma 3 with random weights, a small KV cache, and two tiers: ``ram`` and ``nvme``. Clients
talk in conversations that grow turn by turn. At half time, a byte of some files of ``nvme`` is changed. Prometheus
scrapes the server each second. At the end each panel's queries are sent to it, and the panels are drawn in their
places.

It needs the program ``prometheus``, for example from the Debian package of this name.

    python -m benchmarks.dashboard [--seconds 240] [--svg docs/pictures/dashboard.svg]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MultipleLocator, PercentFormatter, ScalarFormatter
from rich.console import Console

from benchmarks.reporting.machine import this_machine
from benchmarks.reporting.style import BLUE, GREEN, GREY, ORANGE, RED, drawn, y_grid
from tests.support import tiny_models
from tests.support.engine.api_server import LEAN, SERVED_NAME, api_server
from tests.support.engine.lab import Lab
from tests.support.prometheus import DASHBOARD, MISSING, Prometheus, as_grafana_sends_it, find_program, prometheus

CLIENTS, CONVERSATIONS = 2, 12
TURN_WORDS, MAX_TURNS, PAUSE_SECONDS = 400, 7, 0.3
DAMAGED_FILES = 40
COLUMNS = 24
"""Width of the dashboard in Grafana's units."""
INCHES_PER_ROW, WIDTH_INCHES = 0.26, 15.0
RATE_SECONDS, STEP_SECONDS = 15, 3
COLOURS = (BLUE, ORANGE, GREEN, RED, GREY, "#56b4e9", "#cc79a7", "black")
FORMATS = {"percentunit": PercentFormatter(1.0), "Bps": EngFormatter("B/s"), "s": EngFormatter("s")}
"""By Grafana's unit."""
TIERS = """\
load_when: always
backends:
  - {name: ram, type: cpu, capacity: 48MiB}
  - {name: nvme, type: disk, path: ./kv-cache, capacity: 192MiB}
"""


class Series(NamedTuple):
    """A line of a panel."""

    label: str
    points: list[tuple[float, float]]
    """Seconds since the start, and values."""


def series_of(panel: dict[str, Any], database: Prometheus, start: float, end: float) -> Iterator[Series]:
    """Yield the lines of a panel, as Grafana shows them.

    Args:
        start, end: the time that is shown, in seconds since 1970.
    """
    for target in panel["targets"]:
        found = database.get(
            "/api/v1/query_range", query=as_grafana_sends_it(target["expr"], RATE_SECONDS),
            start=str(start), end=str(end), step=f"{STEP_SECONDS}s",
        )["result"]  # fmt: skip
        for one in found:
            label = target["legendFormat"]
            for name, value in one["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            points = [(float(at) - start, float(value)) for at, value in one["values"]]
            yield Series(label, [(at, value) for at, value in points if value == value])


def draw_panel(axes: Axes, panel: dict[str, Any], lines: list[Series]) -> None:
    """Draw a panel of the type ``timeseries``."""
    axes.margins(y=0.35)  # for the legend
    for line, colour in zip(lines, COLOURS * len(lines), strict=False):
        axes.plot(*zip(*line.points, strict=True), label=line.label, color=colour, linewidth=1.2)
    axes.yaxis.set_major_formatter(FORMATS.get(panel["fieldConfig"]["defaults"]["unit"], ScalarFormatter()))
    axes.set_ylim(bottom=0.0)
    if axes.get_ylim()[1] <= 0.1 and not any(value for line in lines for _, value in line.points):
        axes.set_ylim(0.0, 1.0)
    axes.set_title(panel["title"], loc="left", fontweight="bold")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:g} min")
    axes.xaxis.set_major_locator(MultipleLocator(60))
    y_grid(axes)
    axes.legend(loc="upper left", ncols=2, fontsize=6.5)


def dashboard(lines: dict[int, list[Series]], caption: str) -> str:
    """Return the dashboard as SVG.

    Args:
        lines: the lines by the panels' numbers.
    """
    panels = DASHBOARD["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)

    def draw(figure: Figure) -> None:
        grid = figure.add_gridspec(rows, COLUMNS)
        for panel in panels:
            place = panel["gridPos"]
            axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
            draw_panel(axes, panel, lines[panel["id"]])

    return drawn(draw, DASHBOARD["title"], caption, INCHES_PER_ROW * rows, "benchmarks.dashboard", WIDTH_INCHES)


def talk(url: str, seed: int, over: threading.Event) -> None:
    """Send turns of some conversations in a random order. When one is long enough, another takes its place."""
    draw = random.Random(seed)
    conversations: list[list[str]] = [[] for _ in range(CONVERSATIONS)]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while not over.wait(draw.random() * PAUSE_SECONDS):
            number = draw.randrange(CONVERSATIONS)
            old = conversations[number] if len(conversations[number]) < MAX_TURNS * TURN_WORDS else []
            words = conversations[number] = old + [f"w{draw.randrange(4, 1000)}" for _ in range(TURN_WORDS)]
            client.completions.create(model=SERVED_NAME, prompt=" ".join(words), max_tokens=16, temperature=0.0)


def damage(folder: Path) -> None:
    """Change a byte in the middle of some objects' files."""
    for path in sorted(folder.rglob("*.kv"))[:DAMAGED_FILES]:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))


def record(folder: Path, seconds: float) -> dict[int, list[Series]]:
    """Serve conversations for some seconds, and return the lines of each panel."""
    (folder / "offload.yaml").write_text(TIERS)
    lab = Lab("gemma3", tiny_models.write_gemma3(folder / "model"), "float32", 128)
    over = threading.Event()
    options = "--num-gpu-blocks-override", "150", "--max-model-len", "3072"
    with (
        api_server(lab, folder / "offload.yaml", folder / "server.log", LEAN, *options) as url,
        prometheus(folder, url, "1s") as database,
    ):
        clients = [threading.Thread(target=talk, args=(url, seed, over)) for seed in range(CLIENTS)]
        start = time.time()
        for client in clients:
            client.start()
        try:
            over.wait(seconds / 2)
            damage(folder / "kv-cache")
            over.wait(seconds / 2)
        finally:
            over.set()
            for client in clients:
                client.join()
        end = time.time()
        return {panel["id"]: list(series_of(panel, database, start, end)) for panel in DASHBOARD["panels"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--svg", type=Path, default=Path("docs/pictures/dashboard.svg"))
    arguments = parser.parse_args()
    if find_program("prometheus") is None:
        parser.error(MISSING.format("prometheus"))
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        lines = record(Path(folder), arguments.seconds)
    console = Console(width=120)
    for panel in DASHBOARD["panels"]:
        console.print(f"{panel['title']}: {', '.join(line.label for line in lines[panel['id']]) or 'no answer'}")
    caption = (
        f"python -m benchmarks.dashboard --seconds {arguments.seconds:g}, {time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"{this_machine().sentence()}. Rates are of {RATE_SECONDS} seconds. At half time, "
        f"a byte of up to {DAMAGED_FILES} files was changed."
    )
    arguments.svg.write_text(dashboard(lines, caption))


if __name__ == "__main__":
    main()
