"""Style of the plots; the same results always give the same file."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#999999"
"""Colours that colour-blind readers can tell apart."""
WIDTH_INCHES = 8.0
TITLE_CHARACTERS, CAPTION_CHARACTERS = 88, 135
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "offload-core",  # else identifiers are random
    "svg.fonttype": "none",  # text is small, can be searched and shows in a diff
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def drawn(
    draw: Callable[[Figure], None], title: str, caption: str, height: float, source: str, width: float = WIDTH_INCHES
) -> str:
    """Return a plot as SVG.

    Args:
        draw: draws into the figure.
        title: the finding.
        caption: the command, the date and the machine.
        height: the height of the figure, in inches.
        source: the description of the results, for the file's metadata.
        width: the width of the figure, in inches.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        lines = textwrap.fill(title, int(TITLE_CHARACTERS * width / WIDTH_INCHES))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11, fontweight="bold")
        wrapped = textwrap.fill(caption, int(CAPTION_CHARACTERS * width / WIDTH_INCHES), break_on_hyphens=False)
        figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=7, color="#555555")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Source": source})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def x_grid(axes: Axes) -> None:
    """Draw vertical grid lines for horizontal bars."""
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)


def y_grid(axes: Axes) -> None:
    """Draw horizontal grid lines for vertical bars."""
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
