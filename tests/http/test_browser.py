"""The API reference in a real browser: both colour schemes, a phone's width, no request but its own, from a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.chromium import Tab, browser
from tests.http.serving import Served

pytestmark = pytest.mark.slow

CONTRAST = """
(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => { const f = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
  const behind = e => { while (e) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; e = e.parentElement; } return [255, 255, 255]; };
  const poor = [];
  for (const e of document.querySelectorAll('p, a, code, th, td, li, h1, h2, h3, h4, summary, span')) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push(e.tagName + '.' + e.className + ' ' + ratio.toFixed(2));
  }
  return [...new Set(poor)];
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def keep(tab: Tab, name: str) -> None:
    """Keep a picture where a person asked for it."""
    if folder := os.environ.get("SAKURADITE_PICTURES"):
        Path(folder, f"{name}.png").write_bytes(tab.picture())


@pytest.mark.parametrize("width", [1280, 768, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable(tab: Tab, open_server: Served, width: int, scheme: str) -> None:
    tab.show(width, scheme)
    tab.requests.clear()
    tab.open(f"{open_server.url}/docs")
    keep(tab, f"docs-{width}-{scheme}")
    assert tab.requests == [f"{open_server.url}/docs"]
    assert tab.evaluate("document.title") == "Sakuradite API reference"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert tab.evaluate(CONTRAST) == []
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 253, 253)") == (scheme == "light")
    size: Any = tab.evaluate("parseFloat(getComputedStyle(document.querySelector('main p')).fontSize)")
    assert size >= 16
    aside = tab.evaluate("getComputedStyle(document.querySelector('nav')).position")
    assert aside == ("sticky" if width == 1280 else "static")


def test_links_lead_to_what_they_name(tab: Tab, open_server: Served) -> None:
    tab.show(1280, "light")
    tab.open(f"{open_server.url}/docs")
    lost = tab.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))"
        ".filter(id => !document.getElementById(id))"
    )
    assert lost == []
    tab.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    for anchor in ("schema-DecisionRequest", "createDecision", "error-context_exceeded", "streaming"):
        tab.evaluate(f"document.querySelector('a[href=\"#{anchor}\"]').click()")
        top = tab.evaluate(f"document.getElementById('{anchor}').getBoundingClientRect().top")
        assert -1 <= top < 900, anchor
        assert tab.evaluate("location.hash") == f"#{anchor}"
    keep(tab, "docs-streaming")


def test_tables_have_heads_and_examples_open_without_script(tab: Tab, open_server: Served) -> None:
    tab.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(f"{open_server.url}/docs")
    finally:
        tab.command("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.evaluate("document.querySelectorAll('script').length") == 0
    assert tab.evaluate("document.querySelectorAll('table').length") > 60
    assert (
        tab.evaluate("[...document.querySelectorAll('table')].filter(t => !t.tHead?.rows[0].cells.length).length") == 0
    )
    uneven = (
        "[...document.querySelectorAll('tr')].filter(r => r.cells.length != r.closest('table').rows[0].cells.length)"
    )
    assert tab.evaluate(f"{uneven}.length") == 0
    closed = "document.querySelector('details:not([open])')"
    tab.evaluate(f"window.example = {closed}; example.querySelector('summary').click()")
    assert tab.evaluate("example.open") is True
    assert tab.evaluate("example.querySelector('pre').checkVisibility()") is True


def test_the_page_works_from_a_disk(tab: Tab, open_server: Served, tmp_path: Path) -> None:
    for name, path in (("docs.html", "/docs"), ("openapi.json", "/openapi.json")):
        (tmp_path / name).write_bytes(open_server.client.get(path).content)
    tab.show(1280, "dark")
    tab.requests.clear()
    url = (tmp_path / "docs.html").as_uri()
    tab.open(url)
    assert tab.evaluate(CONTRAST) == []
    link = tab.evaluate("document.querySelector('header a').href")
    assert link == (tmp_path / "openapi.json").as_uri()
    tab.open(link)
    assert tab.requests == [url, link]
    assert '"openapi": "3.1.0"' in tab.evaluate("document.body.textContent")
