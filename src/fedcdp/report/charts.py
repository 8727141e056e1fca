"""Pictures inside the page: line charts as inline SVG, and images as small PNG files.

A chart has no script and no font of its own; its colours come from the page's style, and so dark mode, by class. An image
has a pixel a pixel; the page's style enlarges it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from fedcdp.report.facts import Array

_WIDTH, _HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 14, 42
_TICKS = 5
_FEWEST_DECADES = 1.0  # below, a logarithmic axis would have too few labels


@dataclass(frozen=True)
class Series:
    """One line: its name, the class that gives it colour and dashes, and its points."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def line_chart(series: Sequence[Series], title: str, x_label: str, y_label: str, *, log: bool = False) -> Markup:
    """A chart whose text alternative tells where each line begins and ends. Points must be finite."""
    shown = [each for each in series if each.points]
    if not shown:
        return Markup("")
    xs = [x for each in shown for x, _ in each.points]
    ys = [y for each in shown for _, y in each.points]
    log = log and min(ys) > 0 and math.log10(max(ys) / min(ys)) >= _FEWEST_DECADES
    x_ticks = _linear_ticks(min(0.0, *xs), max(xs), whole=True)
    y_ticks = _log_ticks(min(ys), max(ys)) if log else _linear_ticks(min(0.0, *ys), max(ys))
    x_low, x_high = min(0.0, *xs), max(max(xs), 1.0)
    y_low, y_high = min(*y_ticks, *ys), max(*y_ticks, *ys)

    def across(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        share = math.log(y / y_low) / math.log(y_high / y_low) if log else (y - y_low) / (y_high - y_low or 1.0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">']
    parts += [f"<title>{escape(title)}</title><desc>{escape(_told(shown))}</desc>"]
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_figure(tick)}</text>')
    for tick in x_ticks:
        parts.append(
            f'<text x="{across(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_figure(tick)}</text>'
        )
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle:.1f}" y="{_HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>')
    side = (_TOP + base) / 2
    y_name = f"{y_label}, log scale" if log else y_label
    parts.append(
        f'<text class="name" transform="translate(13 {side:.1f}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
    )
    for each in shown:
        places = [(across(x), up(y)) for x, y in each.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {each.style}" points="{path}"/>')
        parts.append(f'<circle class="dot {each.style}" cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="3.5"/>')
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704  # nosec B704 (every text in it is escaped)


def _told(series: Sequence[Series]) -> str:
    return "; ".join(
        f"{each.name}: {each.points[0][1]:.3g} at {each.points[0][0]:g}, {each.points[-1][1]:.3g} at {each.points[-1][0]:g}"
        for each in series
    )


def _linear_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers, the first at or below `low` and, on the upright axis, the last at or above `high`."""
    span = (high - low) or 1.0
    raw = span / _TICKS
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    step = max(1.0, math.ceil(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), (math.floor if whole else math.ceil)(high / step - (0 if whole else 1e-9))
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the values; over few of them also their halves and fifths."""
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
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e−")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def data_uri(image: Array) -> str:
    """An image [channels, height, width] with values from 0 to 1, as an address that needs no network."""
    bright = (image * 255).round().astype(np.uint8)
    picture = Image.fromarray(bright[0] if len(bright) == 1 else bright.transpose(1, 2, 0))
    written = io.BytesIO()
    picture.save(written, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
