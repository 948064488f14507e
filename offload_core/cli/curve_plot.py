"""A plot of hit rates by capacity, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 64
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
"""Colours that colour-blind readers can tell apart (Okabe and Ito)."""
_MARKS = ("", "6 4", "2 3")
"""Dashes, for print without colours."""


class Point(NamedTuple):
    """One simulation."""

    capacity_bytes: int | None
    """``None`` for no limit; its place is at the right end."""
    label: str
    """Of the capacity."""
    hit_rate: float


class Curve(NamedTuple):
    """The points of one placement."""

    name: str
    points: Sequence[Point]


def curve_plot(title: str, curves: Sequence[Curve]) -> str:
    """Return the plot. There must be at most three curves, each with a point."""
    places = _Places([point for curve in curves for point in curve.points])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, title, size=15),
        *_axes(places),
    ]
    for number, curve in enumerate(curves):
        parts += _curve(curve, places, _COLOURS[number], _MARKS[number])
        parts += _legend_entry(number, curve.name)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Places:
    """Positions on the horizontal axis: capacities by their logarithm, and no limit at the right end."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._logs = {point.capacity_bytes: math.log2(point.capacity_bytes) for point in points if point.capacity_bytes}
        self._unlimited = any(point.capacity_bytes is None for point in points)
        self.labels = {point.capacity_bytes: point.label for point in points}

    def x(self, capacity_bytes: int | None) -> float:
        """Return the horizontal position of a capacity."""
        width = _WIDTH - _LEFT - _RIGHT - 40
        if capacity_bytes is None:
            return _LEFT + 20.0 + width
        low, high = min(self._logs.values()), max(self._logs.values())
        if self._unlimited:
            width -= 70
        share = (self._logs[capacity_bytes] - low) / (high - low) if high > low else 0.5
        return _LEFT + 20 + share * width


def _y(hit_rate: float) -> float:
    return _HEIGHT - _BOTTOM - hit_rate * (_HEIGHT - _TOP - _BOTTOM)


def _axes(places: _Places) -> list[str]:
    parts: list[str] = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for capacity, label in places.labels.items():
        parts.append(_text(places.x(capacity), _HEIGHT - _BOTTOM + 20, label, anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, _text(middle, _HEIGHT - 16, "capacity of the tier; hit tokens per prompt token", anchor="middle")]


def _curve(curve: Curve, places: _Places, colour: str, dashes: str) -> list[str]:
    corners = [(places.x(point.capacity_bytes), _y(point.hit_rate)) for point in curve.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(corners))
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(curve.name)}, '
        f"{escape(point.label)}: {point.hit_rate:.1%}</title></circle>"
        for (x, y), point in zip(corners, curve.points, strict=True)
    ]
    return [
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>',
        *dots,
    ]


def _legend_entry(number: int, name: str) -> list[str]:
    x = _LEFT + 160 * number
    line = f'<line x1="{x}" y1="40" x2="{x + 24}" y2="40" stroke="{_COLOURS[number]}" stroke-width="2" '
    return [f'{line}stroke-dasharray="{_MARKS[number]}"/>', _text(x + 30, 44, name)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
