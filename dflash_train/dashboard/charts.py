"""Curves and bars as inline SVG with their own axes. What a pointer shows is worked out here; the page's script only finds the nearest
place and writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from dflash_train.dashboard.run import Points

WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 440, 200, 46, 10, 12, 24
COLOURS = 8  # as many as report.css names; further series repeat them dashed
DRAWN = 400  # points of a curve; of more only the lowest and the highest of each stretch are drawn


@dataclass(kw_only=True)
class Series:
    label: str
    points: Points


def number(value: float) -> str:
    """A value in three significant digits, large ones with k, M or G."""
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if letter == 'k' else bound):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def precise(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that enclose [low, high], at most `most` + 1 of them."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def thinned(points: Points, most: int = DRAWN) -> Points:
    """At most about `most` points: the lowest and the highest of each stretch, with the first and the last."""
    if len(points) <= most:
        return points
    stretch = math.ceil(len(points) / (most // 2))
    kept = {0, len(points) - 1}
    for i in range(0, len(points), stretch):
        part = range(i, min(i + stretch, len(points)))
        kept |= {min(part, key=lambda k: points[k][1]), max(part, key=lambda k: points[k][1])}
    return [points[i] for i in sorted(kept)]


def line_chart(
    title: str, series: Sequence[Series], *, note: str = "", form: Callable[[float], str] = number, zero: bool = False
) -> str:
    """Curves over steps; nothing where no series has a point. zero: the axis begins at 0."""
    series = [Series(label=s.label, points=thinned(s.points)) for s in series if s.points]
    if not series:
        return ""
    values = [value for s in series for _, value in s.points]
    steps = sorted({step for s in series for step, _ in s.points})
    marks = ticks(min(0.0, *values) if zero else min(values), max(values))
    begin, end = steps[0], steps[-1]

    def x(step: float) -> float:
        inside = WIDTH - LEFT - RIGHT
        return LEFT + inside * ((step - begin) / (end - begin) if end > begin else 0.5)

    y = _vertical(marks)
    drawn = []
    for i, s in enumerate(series):
        spots = [(x(step), y(value)) for step, value in s.points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in spots)
        drawn.append(f'<path class="line {_colour(i)}" d="{path}"/>')
        if len(spots) <= 40:
            drawn += [
                f'<circle class="{_colour(i)}" cx="{px:.1f}" cy="{py:.1f}" r="{2.2 if len(spots) > 1 else 3.5}"/>'
                for px, py in spots
            ]
    by_step = [dict(s.points) for s in series]
    pointed = [
        [
            round(x(step), 1),
            f"step {step:,}",
            [
                [series[i].label, precise(known[step]), round(y(known[step]), 1), i % COLOURS]
                for i, known in enumerate(by_step)
                if step in known
            ],
        ]
        for step in steps
    ]
    labels = "".join(
        f'<text x="{x(step):.0f}" y="{HEIGHT - 7}" text-anchor="{side}">{step:,}</text>'
        for step, side in _ends(begin, end)
    )
    return _figure(title, note, _axis(marks, y, form) + "".join(drawn) + labels, pointed, series)


def _ends(begin: int, end: int) -> list[tuple[int, str]]:
    if begin == end:
        return [(begin, "middle")]
    return [(begin, "start"), (round((begin + end) / 2), "middle"), (end, "end")]


def bar_chart(
    title: str, names: Sequence[str], series: dict[str, Sequence[float | None]], *, note: str = "", word: str = "slot"
) -> str:
    """Shares in [0, 1] side by side for each name; None leaves a gap."""
    if not any(value is not None for values in series.values() for value in values):
        return ""
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    y = _vertical(marks)
    group = (WIDTH - LEFT - RIGHT) / len(names)
    wide = group * 0.8 / len(series)
    drawn, pointed = [], []
    for at, name in enumerate(names):
        middle, rows = LEFT + group * (at + 0.5), []
        for i, (label, values) in enumerate(series.items()):
            value = values[at]
            if value is None:
                continue
            left = middle - group * 0.4 + wide * i
            drawn.append(
                f'<rect class="{_colour(i)}" x="{left:.1f}" y="{y(value):.1f}" width="{max(0.5, wide - 1):.1f}" '
                f'height="{y(0) - y(value):.1f}"/>'
            )
            rows.append([label, f"{value:.1%}", round(y(value), 1), i % COLOURS])
        pointed.append([round(middle, 1), f"{word} {name}", rows])
    every = math.ceil(len(names) / 16)
    labels = "".join(
        f'<text x="{LEFT + group * (at + 0.5):.0f}" y="{HEIGHT - 7}" text-anchor="middle">{escape(name)}</text>'
        for at, name in enumerate(names)
        if at % every == 0
    )
    shown = [Series(label=label, points=[]) for label in series]
    return _figure(title, note, _axis(marks, y, percent) + "".join(drawn) + labels, pointed, shown)


def interval_bar(value: float, low: float, high: float, most: float) -> str:
    """A value with its interval on a line from 1 to `most`, as a small picture."""
    at = lambda v: 2 + 116 * (v - 1) / max(most - 1, 1e-9)
    return (
        f'<svg class="span" viewBox="0 0 120 12" role="img"><title>{value:.2f}, from {low:.2f} to {high:.2f}</title>'
        f'<line class="axis" x1="2" x2="118" y1="6" y2="6"/><line class="c0" x1="{at(low):.1f}" x2="{at(high):.1f}" y1="6" y2="6"/>'
        f'<circle class="c0" cx="{at(value):.1f}" cy="6" r="3.5"/></svg>'
    )


def _colour(i: int) -> str:
    return f"c{i % COLOURS}" + (" dashed" if i >= COLOURS else "")


def _vertical(marks: list[float]) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    return lambda value: ABOVE + (HEIGHT - ABOVE - BELOW) * (high - value) / (high - low)


def _axis(marks: list[float], y: Callable[[float], float], form: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{escape(form(mark))}</text>'
        for mark in marks
    )


def _figure(title: str, note: str, drawing: str, pointed: list, series: Sequence[Series]) -> str:
    legend = ""
    if len(series) > 1:
        keys = "".join(
            f'<li><i class="{_colour(i)}"></i>{escape(s.label)}'
            + (f" <b>{escape(precise(s.points[-1][1]))}</b>" if s.points else "")
            + "</li>"
            for i, s in enumerate(series)
        )
        legend = f'<ul class="keys">{keys}</ul>'
    last = f" <b>{escape(precise(series[0].points[-1][1]))}</b>" if len(series) == 1 and series[0].points else ""
    small = f'<p class="muted">{escape(note)}</p>' if note else ""
    data = escape(json.dumps(pointed, ensure_ascii=False, separators=(",", ":")))
    return (
        f'<figure class="chart" data-points="{data}" tabindex="0"><figcaption>{escape(title)}{last}</figcaption>{legend}'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>{drawing}'
        f'<g class="at"></g></svg><div class="tip" hidden></div></div>{small}</figure>\n'
    )
