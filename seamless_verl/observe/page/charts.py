"""Charts as SVG text: no script, no library, colours from the page's style sheet, exact values on hover."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 34
_BAND, _BINS = 40.0, 28
_MOST_POINTS = 600  # or columns: more than there are pixels for


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line.

    Attributes:
        points: ``(x, y)`` in order of x.
        style: class of the style sheet.
        intervals: ``(low, high)`` per point, or empty.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: str
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps data to the drawing area."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        span = self.high_x - self.low_x or 1.0
        return round(_LEFT + (value - self.low_x) / span * (WIDTH - _LEFT - _RIGHT), 2)

    def y(self, value: float) -> float:
        span = self.high_y - self.low_y or 1.0
        return round(HEIGHT - _BOTTOM - (value - self.low_y) / span * (HEIGHT - _TOP - _BOTTOM), 2)


def lines(series: Sequence[Series], *, x_label: str, y_format: Callable[[float], str]) -> str:
    """Lines over a shared x axis; empty text when there is nothing to draw."""
    series = [_thinned(one) for one in series]
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [bound for one in series for pair in one.intervals if pair for bound in pair]
    if not xs:
        return ""
    ticks = _ticks(min(0.0, *ys), max(ys))
    margin = (max(xs) - min(xs)) * 0.03 or 1.0
    frame = _Frame(low_x=min(xs) - margin, high_x=max(xs) + margin, low_y=ticks[0], high_y=ticks[-1])
    parts = [_y_axis(frame, ticks, y_format), _x_axis(frame, _step_ticks(min(xs), max(xs)), x_label)]
    for one in series:
        parts.append(_line(one, frame, y_format, x_label))
    return _svg("".join(parts), ", ".join(one.label for one in series)) + _legend(
        [(one.label, one.style) for one in series]
    )


def _thinned(one: Series) -> Series:
    """Of each stretch of a long line its lowest and its highest point."""
    num = len(one.points)
    if num <= _MOST_POINTS:
        return one
    stretch = math.ceil(2 * num / _MOST_POINTS)
    kept = sorted(
        {
            pick(range(start, min(start + stretch, num)), key=lambda index: one.points[index][1])
            for start in range(0, num, stretch)
            for pick in (min, max)
        }
    )
    intervals = [one.intervals[index] for index in kept] if one.intervals else ()
    return replace(one, points=[one.points[index] for index in kept], intervals=intervals)


def _line(one: Series, frame: _Frame, y_format: Callable[[float], str], x_label: str) -> str:
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in one.points)
    parts = [f'<polyline class="line {one.style}" points="{path}"/>']
    for (x, _), pair in zip(one.points, one.intervals, strict=False):
        if pair is not None:
            parts.append(
                f'<line class="whisker {one.style}" x1="{frame.x(x)}" x2="{frame.x(x)}" '
                f'y1="{frame.y(pair[0])}" y2="{frame.y(pair[1])}"/>'
            )
    for x, y in one.points:
        title = escape(f"{one.label}: {y_format(y)} ({x_label} {x:g})")
        radius = 3 if len(one.points) <= 60 else 1.5
        parts.append(
            f'<circle class="dot {one.style}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="{radius}">'
            f"<title>{title}</title></circle>"
        )
    return "".join(parts)


def histogram(values: Sequence[float], *, x_label: str, style: str) -> str:
    """How often each value occurs; whole numbers of a small range get a bar each."""
    if not values:
        return ""
    low, high = min(values), max(values)
    whole = all(float(value).is_integer() for value in values)
    if whole and high - low < _BINS:
        start, width, count = low - 0.5, 1.0, int(high - low) + 1
    else:
        width = _nice((high - low) / _BINS or 1.0)
        start = math.floor(low / width) * width
        count = int((high - start) / width) + 1
    counts = [0] * count
    for value in values:
        counts[min(count - 1, int((value - start) / width))] += 1
    ticks = _ticks(0.0, float(max(counts)), whole=True)
    frame = _Frame(low_x=start, high_x=start + count * width, low_y=0.0, high_y=ticks[-1])
    parts = [_y_axis(frame, ticks, lambda value: f"{value:g}")]
    for index, number in enumerate(counts):
        if not number:
            continue
        left, right = frame.x(start + index * width), frame.x(start + (index + 1) * width)
        gap = max(min(1.5, (right - left) * 0.1), (right - left - 90.0) / 2)
        span = (
            f"{start + 0.5 + index:g}"
            if width == 1.0 and whole
            else (f"{start + index * width:.4g} to {start + (index + 1) * width:.4g}")
        )
        parts.append(
            f'<rect class="bar {style}" x="{left + gap:.2f}" width="{right - left - 2 * gap:.2f}" '
            f'y="{frame.y(number)}" height="{frame.y(0) - frame.y(number):.2f}">'
            f"<title>{escape(f'{x_label} {span}: {number} ({number / len(values):.1%})')}</title></rect>"
        )
    where = (
        [float(v) for v in range(int(low), int(high) + 1)]
        if whole and count <= 12 and width == 1.0
        else _ticks(start, start + count * width)
    )
    parts.append(_x_axis(frame, [tick for tick in where if frame.low_x <= tick <= frame.high_x], x_label))
    return _svg("".join(parts), f"histogram of {x_label}")


def columns(
    stacks: Sequence[tuple[str, Mapping[str, float]]], *, styles: Mapping[str, str], x_label: str, y_unit: str
) -> str:
    """Stacked columns, one per ``(label, amounts by part)``; ``styles`` gives the order of the parts from below. Where
    they are too many, one is the mean of some."""
    if not stacks:
        return ""
    some = math.ceil(len(stacks) / _MOST_POINTS)
    if some > 1:
        stacks = [_mean(stacks[start : start + some]) for start in range(0, len(stacks), some)]
    ticks = _ticks(0.0, max(sum(amounts.values()) for _, amounts in stacks))
    frame = _Frame(low_x=0.0, high_x=float(len(stacks)), low_y=0.0, high_y=ticks[-1])
    parts = [_y_axis(frame, ticks, lambda value: f"{value:g} {y_unit}")]
    for index, (label, amounts) in enumerate(stacks):
        left, right = frame.x(index), frame.x(index + 1)
        gap = min(3.0, (right - left) * 0.12)
        width = min(right - left - 2 * gap, 72.0)
        base = 0.0
        for part, style in styles.items():
            amount = amounts.get(part, 0.0)
            if amount <= 0:
                continue
            top = frame.y(base + amount)
            title = escape(f"{x_label} {label}: {part} {amount:.3g} {y_unit}")
            parts.append(
                f'<rect class="{style}" x="{(left + right - width) / 2:.2f}" width="{width:.2f}" y="{top}" '
                f'height="{frame.y(base) - top:.2f}"><title>{title}</title></rect>'
            )
            base += amount
    stride = max(1, math.ceil(len(stacks) / 12))
    for index in range(0, len(stacks), stride):
        middle = (frame.x(index) + frame.x(index + 1)) / 2
        parts.append(f'<text class="tick" x="{middle:.2f}" y="{HEIGHT - 18}" text-anchor="middle">')
        parts.append(f"{escape(stacks[index][0].partition(' to ')[0])}</text>")
    parts.append(_x_axis(frame, (), x_label))
    return _svg("".join(parts), f"{y_unit} by part and {x_label}")


def _mean(stacks: Sequence[tuple[str, Mapping[str, float]]]) -> tuple[str, Mapping[str, float]]:
    names = {part: None for _, amounts in stacks for part in amounts}
    amounts = {part: sum(amounts.get(part, 0.0) for _, amounts in stacks) / len(stacks) for part in names}
    return f"{stacks[0][0]} to {stacks[-1][0]}, on average", amounts


def bands(
    levels: Sequence[tuple[float, Mapping[str, float]]],
    *,
    stop: float,
    styles: Mapping[str, str],
    x_label: str,
    number: Callable[[float], str],
) -> str:
    """A band per part: when there was some of it, and how much of its own most. For parts of very unlike size.

    Args:
        levels: ``(x, amounts by part from there on)``, in order of x; amounts stay until they change.
        stop: where the last of them ends.
        styles: class of the style sheet by part, in order from above.
    """
    if not levels:
        return ""
    height = _BOTTOM + _BAND * len(styles)
    frame = _Frame(low_x=min(0.0, levels[0][0]), high_x=max(stop, levels[-1][0]), low_y=0.0, high_y=1.0)
    ends = [*(x for x, _ in levels[1:]), frame.high_x]
    parts = []
    for row, (part, style) in enumerate(styles.items()):
        most = max(amounts.get(part, 0.0) for _, amounts in levels) or 1.0
        base = _BAND * (row + 1) - 4.0
        path = []
        for (start, amounts), end in zip(levels, ends, strict=True):
            if amounts.get(part, 0.0) > 0:
                top = base - (_BAND - 20.0) * amounts[part] / most
                path.append(f"M{frame.x(start)},{base}V{top:.1f}H{frame.x(end)}V{base}Z")
        label = escape(f"{part}, up to {number(most)}")
        parts.append(f'<text class="tick" x="{_LEFT}" y="{base - _BAND + 16}">{label}</text>')
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        parts.append(f'<path class="{style}" d="{"".join(path)}"><title>{label}</title></path>')
    ticks = [tick for tick in _ticks(frame.low_x, frame.high_x) if frame.low_x <= tick <= frame.high_x]
    parts.append(f'<g transform="translate(0 {height - HEIGHT})">{_x_axis(frame, ticks, x_label)}</g>')
    return _svg("".join(parts), f"{', '.join(styles)} over time", height)


def scatter(
    points: Sequence[tuple[float, float, str]], *, x_label: str, y_label: str, number: Callable[[float], str]
) -> str:
    """Dots ``(x, y, title)`` on equal axes with the diagonal on which y is x."""
    if not points:
        return ""
    values = [value for x, y, _ in points for value in (x, y)]
    ticks = _ticks(min(0.0, *values), max(0.0, *values))
    frame = _Frame(low_x=ticks[0], high_x=ticks[-1], low_y=ticks[0], high_y=ticks[-1])
    parts = [_y_axis(frame, ticks, number), _x_axis(frame, ticks, x_label, number)]
    ends = [(frame.x(end), frame.y(end)) for end in (ticks[0], ticks[-1])]
    parts.append(f'<line class="diagonal" x1="{ends[0][0]}" y1="{ends[0][1]}" x2="{ends[1][0]}" y2="{ends[1][1]}"/>')
    parts.append(f'<text class="tick" x="{ends[1][0] - 4}" y="{ends[1][1] + 34}" text-anchor="end">as predicted</text>')
    parts.append(f'<text class="tick" x="{_LEFT + 6}" y="{_TOP + 10}">{escape(y_label)}</text>')
    for x, y, title in points:
        where = f'cx="{frame.x(x)}" cy="{frame.y(y)}" r="4"'
        parts.append(f'<circle class="dot s-train" {where}><title>{escape(title)}</title></circle>')
    return _svg("".join(parts), f"{y_label} over {x_label}")


def _svg(body: str, label: str, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="key {style}"></i>{escape(label)}</span>' for label, style in entries)
    return f'<p class="legend">{items}</p>'


def _y_axis(frame: _Frame, ticks: Sequence[float], number: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{frame.y(tick)}" y2="{frame.y(tick)}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{frame.y(tick) + 4}" text-anchor="end">{escape(number(tick))}</text>'
        for tick in ticks
    )


def _x_axis(
    frame: _Frame, ticks: Sequence[float], label: str, number: Callable[[float], str] = lambda value: f"{value:g}"
) -> str:
    marks = "".join(
        f'<text class="tick" x="{frame.x(tick)}" y="{HEIGHT - 18}" text-anchor="middle">{escape(number(tick))}</text>'
        for tick in ticks
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return f'{marks}<text class="axis" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(label)}</text>'


def _nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step * (1 - 1e-9))


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round values from at or below ``low`` to at or above ``high``."""
    step = _nice((high - low) / 4 or abs(high) / 4 or 0.25)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _step_ticks(low: float, high: float) -> list[float]:
    stride = max(1, math.ceil((high - low) / 10))
    return [float(value) for value in range(math.ceil(low), math.floor(high) + 1, stride)]
