"""Draws a Grafana dashboard from scraped pages, without Grafana: its grid, panels, units, legends and colours."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

from tests.promql import Series, evaluate

WIDTH, UNIT, GAP = 1800, 34, 8
COLUMN = WIDTH / 24
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d", "#fade2a")
STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 12px Inter, Helvetica, Arial, sans-serif; }
.panel, .row { position: absolute; box-sizing: border-box; overflow: hidden; }
.panel { background: #181b1f; border: 1px solid #25272c; border-radius: 2px; padding: 6px 8px; }
.row { font-size: 15px; font-weight: 500; padding: 6px 2px; }
.title { font-size: 13px; font-weight: 500; white-space: nowrap; }
.legend { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; line-height: 15px; font-size: 11px; }
.key { display: inline-block; width: 12px; height: 3px; margin: 0 4px 3px 0; }
.stat { text-align: center; font-size: 42px; font-weight: 600; margin-top: 18px; }
text { fill: #9a9ba5; font-size: 10px; }
"""

type Line = list[tuple[float, float]]


def drawn(dashboard: dict[str, Any], series: Series, start: float, end: float, interval: str) -> str:
    """The dashboard as a page of HTML. Panels without data say so, as Grafana does."""
    moments = [start + i * (end - start) / 120 for i in range(121)]
    parts = [_panel(panel, series, moments, interval) for panel in dashboard["panels"]]
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{''.join(parts)}"


def height(dashboard: dict[str, Any]) -> int:
    """Of the page, in pixels."""
    return int(max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"]) * UNIT + 10)


def _panel(panel: dict[str, Any], series: Series, moments: list[float], interval: str) -> str:
    place = panel["gridPos"]
    left, top = place["x"] * COLUMN + GAP / 2, place["y"] * UNIT + GAP / 2
    wide, high = place["w"] * COLUMN - GAP, place["h"] * UNIT - GAP
    box = f"left:{left:.0f}px;top:{top:.0f}px;width:{wide:.0f}px;height:{high:.0f}px"
    if panel["type"] == "row":
        return f'<div class=row style="{box}">{html.escape(panel["title"])}</div>'
    lines = _lines(panel, series, moments, interval)
    title = f"<div class=title>{html.escape(panel['title'])}</div>"
    draw = _stat if panel["type"] == "stat" else _chart
    inside = draw(panel, lines, moments, wide - 18, high - 30) if lines else "<div class=stat>No data</div>"
    return f'<div class=panel style="{box}">{title}{inside}</div>'


def _lines(panel: dict[str, Any], series: Series, moments: list[float], interval: str) -> dict[str, Line]:
    """Each series of the panel by its legend."""
    lines: dict[str, Line] = {}
    for target in panel["targets"]:
        for moment in moments:
            for labels, value in evaluate(target["expr"], series, moment, interval).items():
                name = target["legendFormat"]
                for label, text in labels:
                    name = name.replace("{{" + label + "}}", text)
                if math.isfinite(value):
                    lines.setdefault(name, []).append((moment, value))
    return dict(sorted(lines.items()))


def _stat(panel: dict[str, Any], lines: dict[str, Line], moments: list[float], wide: float, high: float) -> str:
    value = next(iter(lines.values()))[-1][1]
    colour = "#73bf69"
    for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            colour = {"green": "#73bf69", "red": "#f2495c", "orange": "#ff9830"}[step["color"]]
    shown = spelt(value, panel["fieldConfig"]["defaults"]["unit"])
    return f'<div class=stat style="color:{colour}">{shown}</div>'


def _chart(panel: dict[str, Any], lines: dict[str, Line], moments: list[float], wide: float, high: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in defaults["custom"]
    high -= 15 * min(2, 1 + len(lines) // 6)
    floor: dict[float, float] = {}
    tops: dict[str, Line] = {}
    for name, line in lines.items():
        tops[name] = [(at, value + (floor.get(at, 0.0) if stacked else 0.0)) for at, value in line]
        floor |= dict(tops[name])
    most = defaults.get("max") or _round_up(max((v for line in tops.values() for _, v in line), default=1.0))
    edge, bottom = 62.0, high - 16

    def x(at: float) -> float:
        return edge + (at - moments[0]) / (moments[-1] - moments[0]) * (wide - edge)

    def y(value: float) -> float:
        return bottom - min(value / most, 1.0) * (bottom - 8)

    parts = []
    for i in range(5):
        value = most * i / 4
        label = spelt(value, defaults["unit"])
        parts.append(f'<line x1={edge} x2={wide:.0f} y1={y(value):.1f} y2={y(value):.1f} stroke="#2a2d33"/>')
        parts.append(f"<text x={edge - 5} y={y(value) + 3:.1f} text-anchor=end>{label}</text>")
    for i in range(7):
        at = moments[0] + i * (moments[-1] - moments[0]) / 6
        parts.append(f"<text x={x(at):.0f} y={high - 2:.0f} text-anchor=middle>{at - moments[0]:.0f} s</text>")
    for number, line in reversed(list(enumerate(tops.values()))):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line)
        area = f"{x(line[0][0]):.1f},{bottom:.1f} {path} {x(line[-1][0]):.1f},{bottom:.1f}"
        parts.append(f'<polygon points="{area}" fill="{colour}" opacity="{0.35 if stacked else 0.08}"/>')
        parts.append(f'<polyline points="{path}" fill=none stroke="{colour}" stroke-width=1.5 />')
    keys = _keys(lines)
    return f"<svg width={wide:.0f} height={high:.0f}>{''.join(parts)}</svg><div class=legend>{keys}</div>"


def _keys(names: Iterable[str]) -> str:
    return " &nbsp; ".join(
        f'<span class=key style="background:{COLOURS[i % len(COLOURS)]}"></span>{html.escape(name)}'
        for i, name in enumerate(names)
    )


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 3, 4, 5, 8, 10) if step * scale >= value * 0.999)


def spelt(value: float, unit: str) -> str:
    """A number in a unit, as Grafana would write it."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1000:.3g} ms"
    base, names = (1024.0, (" B", " KiB", " MiB", " GiB")) if unit == "bytes" else (1000.0, ("", " K", " Mil", " Bil"))
    step = 0
    while value >= base and step < 3:
        value, step = value / base, step + 1
    return f"{value:.3g}{names[step]}{ {'reqps': ' req/s', 'ops': ' ops/s'}.get(unit, '') }"
