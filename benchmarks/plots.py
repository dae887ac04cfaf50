"""Figures for the documentation as plain SVG, readable on light and dark ground; no plotting library."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks import parts

_WIDTH, _HEIGHT = 300, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 10, 30, 52
_COLOURS = ("#2563b8", "#1a936f", "#e0a100", "#c8321f")
_INK = "#7a828c"


def extend(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that runs in pieces and can be drawn."""
    parts.extend(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what was measured")


def figure(file: Path, panels: Sequence[str]) -> None:
    """Write panels (of `bars`, `stacks` or `lines`) side by side."""
    body = "".join(f'<g transform="translate({number * _WIDTH},0)">{panel}</g>' for number, panel in enumerate(panels))
    size = f'viewBox="0 0 {_WIDTH * len(panels)} {_HEIGHT}" width="{_WIDTH * len(panels)}" height="{_HEIGHT}"'
    style = "text{font:11px sans-serif;fill:" + _INK + "}line{stroke:" + _INK + "}"
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{body}</svg>\n', encoding="utf-8"
    )


def bars(title: str, values: Mapping[str, Sequence[float]]) -> str:
    """A column per label as high as the median, with a whisker from the least to the greatest value."""
    top = max(max(each) for each in values.values())
    parts = [_frame(title, 0.0, top)]
    for number, (label, each) in enumerate(values.items()):
        x, width = _column(number, len(values))
        ordered = sorted(each)
        high = _y(ordered[len(ordered) // 2], 0.0, top)
        parts.append(_rect(x, high, width, _y(0.0, 0.0, top) - high, _COLOURS[0]))
        low, high = (_y(end, 0.0, top) for end in (ordered[0], ordered[-1]))
        parts.append(f'<line x1="{x + width / 2:.1f}" x2="{x + width / 2:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        parts.append(_text(x + width / 2, _HEIGHT - _BOTTOM + 14, label, "middle"))
    return "".join(parts)


def stacks(title: str, shares: Mapping[str, Mapping[str, float]]) -> str:
    """A column per label, made of parts that add up to 1."""
    names = list(dict.fromkeys(name for column in shares.values() for name in column))
    drawn = [_frame(title, 0.0, 1.0), _legend(names)]
    for number, (label, column) in enumerate(shares.items()):
        x, width = _column(number, len(shares))
        base = 0.0
        for name, share in column.items():
            top = _y(base + share, 0.0, 1.0)
            drawn.append(_rect(x, top, width, _y(base, 0.0, 1.0) - top, _COLOURS[names.index(name)]))
            base += share
        drawn.append(_text(x + width / 2, _HEIGHT - _BOTTOM + 14, label, "middle"))
    return "".join(drawn)


def lines(title: str, series: Mapping[str, Sequence[float]], x_label: str) -> str:
    """A line per label over the numbers from 0 on."""
    values = [value for each in series.values() for value in each]
    low, high = min(0.0, *values), max(values)
    most = max(len(each) for each in series.values()) - 1
    drawn = [_frame(title, low, high), _legend(list(series))]
    for number, each in enumerate(series.values()):
        points = " ".join(
            f"{_LEFT + at * (_WIDTH - _LEFT - _RIGHT) / max(1, most):.1f},{_y(value, low, high):.1f}"
            for at, value in enumerate(each)
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS[number]}" stroke-width="2"/>')
    drawn.append(_text(_LEFT, _HEIGHT - _BOTTOM + 14, "0", "middle"))
    drawn.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 14, f"{most} {x_label}", "end"))
    return "".join(drawn)


def _y(value: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (value - low) / (high - low or 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def _column(number: int, count: int) -> tuple[float, float]:
    step = (_WIDTH - _LEFT - _RIGHT) / count
    return _LEFT + step * (number + 0.2), 0.6 * step


def _frame(title: str, low: float, high: float) -> str:
    bottom = _HEIGHT - _BOTTOM
    axes = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    ends = "".join(_text(_LEFT - 5, _y(end, low, high) + 4, f"{end:.3g}", "end") for end in (low, high))
    return axes + ends + _text(_LEFT, 16, title, "start")


def _legend(labels: Sequence[str]) -> str:
    step = (_WIDTH - _LEFT - _RIGHT) / len(labels)
    return "".join(
        _rect(_LEFT + number * step, _HEIGHT - 21, 10, 10, _COLOURS[number])
        + _text(_LEFT + number * step + 14, _HEIGHT - 12, label, "start")
        for number, label in enumerate(labels)
    )


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
