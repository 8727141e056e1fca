"""Pictures inside the page: line charts as inline SVG, and images as small PNG files.

A chart has no script and no font. Its colours come from classes in the page's style, so dark mode applies to it. An image
has one pixel for each pixel of the example; the page's style enlarges it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from fedcdp.report.facts import Array

_WIDTH, _HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 14, 42
_TICKS = 5
_FEWEST_DECADES = 1.0  # below, a logarithmic axis would have too few labels
_TOUCH = 2.0  # lines that are nowhere further apart than this look like one line
_DASH, _APART = 14, 28  # of lines that coincide: the length of a dash, and the distance between their marks

Place = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: its name, the class for its colour and dashes, its points, and the number of its mark."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    mark: int = 0


@dataclass(frozen=True)
class Frame:
    """The axes around some lines, and where each point is drawn."""

    series: tuple[Series, ...]
    log: bool
    log_x: bool = False

    @staticmethod
    def around(series: Sequence[Series], log: bool, log_x: bool = False) -> Frame:
        """The frame of the lines that have points; an axis is logarithmic if asked for and if its values span a decade."""
        shown = tuple(each for each in series if each.points)
        xs, ys = ([point[axis] for each in shown for point in each.points] for axis in (0, 1))
        return Frame(shown, log and _spans_a_decade(ys), log_x and _spans_a_decade(xs))

    @cached_property
    def x_ticks(self) -> list[float]:
        """Where the horizontal axis has labels."""
        xs = [x for each in self.series for x, _ in each.points]
        if self.log_x:
            return [tick for tick in _log_ticks(min(xs), max(xs)) if min(xs) <= tick <= max(xs)]
        return _linear_ticks(min(0.0, *xs), max(xs), whole=True)

    @cached_property
    def y_ticks(self) -> list[float]:
        """Where the vertical axis has labels."""
        ys = [y for each in self.series for _, y in each.points]
        if self.log:
            return _log_ticks(min(ys), max(ys))
        all_far_from_zero = 0 < max(ys) / 2 < min(ys)
        return _linear_ticks(min(ys) if all_far_from_zero else min(0.0, *ys), max(ys))

    @cached_property
    def _ranges(self) -> tuple[float, float, float, float]:
        xs = [x for each in self.series for x, _ in each.points]
        ys = [*self.y_ticks, *(y for each in self.series for _, y in each.points)]
        across = (min(xs), max(xs)) if self.log_x else (min(0.0, *xs), max(1.0, *xs))
        return *across, min(ys), max(ys)

    def across(self, x: float) -> float:
        """The horizontal place of a value."""
        low, high, _, _ = self._ranges
        share = math.log(x / low) / math.log(high / low) if self.log_x else (x - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        """The vertical place of a value."""
        _, _, low, high = self._ranges
        share = math.log(y / low) / math.log(high / low) if self.log else (y - low) / (high - low or 1.0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    @cached_property
    def places(self) -> list[list[Place]]:
        """The points of every line in the picture."""
        return [[(self.across(x), self.up(y)) for x, y in each.points] for each in self.series]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The lines that coincide, by number: several in a group wherever one would hide another."""
        groups: list[list[int]] = []
        for number, places in enumerate(self.places):
            home = next((group for group in groups if _coincide(self.places[group[0]], places)), None)
            if home is None:
                groups.append([number])
            else:
                home.append(number)
        return groups

    def dashes(self, number: int) -> str:
        """The style of a line that coincides with others: their dashes take turns. Nothing for a line on its own."""
        group = next(group for group in self.groups if number in group)
        if len(group) == 1:
            return ""
        gap, before = _DASH * (len(group) - 1), _DASH * group.index(number)
        return f"stroke-dasharray:{_DASH} {gap};stroke-dashoffset:{-before}"

    def marks(self, number: int) -> list[Place]:
        """Where a line has its mark: at its end. Lines that coincide have marks all along, in turns."""
        group = next(group for group in self.groups if number in group)
        xs, ys = zip(*self.places[number], strict=True)
        if len(group) == 1:
            return [(xs[-1], ys[-1])]
        first = xs[-1] - _APART * group.index(number)
        spots = [first, *np.arange(first - _APART * len(group), xs[0], -_APART * len(group))]
        return [(float(x), float(np.interp(x, xs, ys))) for x in spots if x >= _LEFT] or [(xs[-1], ys[-1])]


def coincident(series: Sequence[Series], *, log: bool = False, log_x: bool = False) -> list[list[Series]]:
    """The lines of a chart that lie on each other, group by group."""
    frame = Frame.around(series, log, log_x)
    return [[frame.series[number] for number in group] for group in frame.groups if len(group) > 1]


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log: bool = False, log_x: bool = False
) -> Markup:
    """A chart whose text alternative says where each line begins and ends. Points must be finite."""
    if not any(each.points for each in series):
        return Markup("")
    frame = Frame.around(series, log, log_x)
    parts = [f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">']
    parts += [f"<title>{escape(title)}</title><desc>{escape(_told(frame.series))}</desc>"]
    for tick in frame.y_ticks:
        y = frame.up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_figure(tick)}</text>')
    for tick in frame.x_ticks:
        x = frame.across(tick)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_figure(tick)}</text>')
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    x_name = f"{x_label}, log scale" if frame.log_x else x_label
    parts.append(f'<text class="name" x="{middle:.1f}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    side = (_TOP + base) / 2
    y_name = f"{y_label}, log scale" if frame.log else y_label
    parts.append(
        f'<text class="name" transform="translate(10 {side:.1f}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
    )
    for number, (each, places) in enumerate(zip(frame.series, frame.places, strict=True)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {each.style}"{_style(frame.dashes(number))} points="{path}"/>')
    for number, each in enumerate(frame.series):  # above all lines
        parts += [_mark(each, *place) for place in frame.marks(number)]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704  # nosec B704 (every text in it is escaped)


def keys(series: Sequence[Series], *, log: bool = False, log_x: bool = False) -> list[tuple[Series, Markup]]:
    """The lines of a chart, each with the picture for its legend: colour, dashes and mark as in the chart."""
    frame = Frame.around(series, log, log_x)
    found = []
    for number, each in enumerate(frame.series):
        dashes = "stroke-dasharray:8 4" if frame.dashes(number) else ""
        line = f'<polyline class="line {each.style}"{_style(dashes)} points="0,6 40,6"/>'
        picture = f'<svg class="key" aria-hidden="true" viewBox="0 0 40 12">{line}{_mark(each, 20, 6)}</svg>'
        found.append((each, Markup(picture)))  # noqa: S704  # nosec B704 (it holds no text)
    return found


def _spans_a_decade(values: Sequence[float]) -> bool:
    return min(values) > 0 and math.log10(max(values) / min(values)) >= _FEWEST_DECADES


def _coincide(one: Sequence[Place], other: Sequence[Place]) -> bool:
    """Whether two lines look like one wherever both are drawn."""
    (x_one, y_one), (x_other, y_other) = (np.array(each).T for each in (one, other))
    low, high = max(x_one[0], x_other[0]), min(x_one[-1], x_other[-1])
    xs = np.unique(np.concatenate([x_one, x_other]))
    xs = xs[(xs >= low) & (xs <= high)]
    if len(xs) < min(2, len(one), len(other)):
        return False
    return bool((np.abs(np.interp(xs, x_one, y_one) - np.interp(xs, x_other, y_other)) <= _TOUCH).all())


def _style(rules: str) -> str:
    return f' style="{rules}"' if rules else ""


_MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",  # a circle
    "M-3.3 -3.3h6.6v6.6h-6.6z",  # a square
    "M0 -4.4l4.2 7.4h-8.4z",  # a triangle
    "M0 -4.8l4.2 4.8l-4.2 4.8l-4.2 -4.8z",  # a diamond
)


def _mark(each: Series, x: float, y: float) -> str:
    shape = _MARKS[each.mark % len(_MARKS)]
    return f'<path class="dot {each.style}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'


def _told(series: Sequence[Series]) -> str:
    return "; ".join(
        f"{each.name}: {each.points[0][1]:.3g} at {each.points[0][0]:g}, {each.points[-1][1]:.3g} at {each.points[-1][0]:g}"
        for each in series
    )


def _linear_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers, the first at or below `low` and, on the vertical axis, the last at or above `high`."""
    span = (high - low) or 1.0
    if span < 1e-9 * abs(high):  # the values differ by rounding alone
        span = abs(high)
    raw = span / _TICKS
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    step = max(1.0, math.ceil(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), (math.floor if whole else math.ceil)(high / step - (0 if whole else 1e-9))
    if first == last and not whole:  # all values are one round number: a scale needs a second label
        first, last = (first - 1, last) if first > 0 else (first, last + 1)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the values. If there are few, also twice and five times each."""
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if top - bottom <= 2 else (1,)
    step = -(-(top - bottom) // 7) or 1
    ticks = [factor * 10.0**power for power in range(bottom, top + 1, step) for factor in factors]
    inside = [tick for tick in ticks if low <= tick <= high]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return sorted({below, *inside, above})


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) <= 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e−")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def data_uri(image: Array) -> str:
    """An image [channels, height, width] with values from 0 to 1, as a data URI."""
    bright = (image * 255).round().astype(np.uint8)
    picture = Image.fromarray(bright[0] if len(bright) == 1 else bright.transpose(1, 2, 0))
    written = io.BytesIO()
    picture.save(written, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
