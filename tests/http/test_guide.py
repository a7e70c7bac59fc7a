"""Every command in docs/http.md, run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sakuradite
from sakuradite.errors import APIError
from sakuradite.http.examples import MODEL
from tests.http.serving import EngineGateway, Served, serve

TEXT = (Path(sakuradite.__file__).parents[1] / "docs" / "http.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SHELL = [code for kind, code in BLOCKS if kind == "sh" and "curl" in code]
PYTHON = [code for kind, code in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(EngineGateway(MODEL)) as served:
        yield served


def run(command: list[str], served: Served, folder: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "SAKURADITE": served.url, "SAKURADITE_API_KEY": "none", "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", SHELL)
def test_shell(served: Served, tmp_path: Path, code: str) -> None:
    said = run(
        ["bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl -sS --fail-with-body ")], served, tmp_path
    )
    if "-o docs.html" in code:
        assert (tmp_path / "docs.html").stat().st_size > 100_000
        assert (tmp_path / "openapi.json").read_text().startswith("{")
    elif "stream" in code:
        assert said.startswith("event: answer\n")
        assert "event: complete\n" in said
    elif "decisions" in code:
        assert all(f'"{name}"' in said for name in ("refund", "team", "mood", "usage"))
    else:
        assert MODEL in said
        assert '{"status":"ready"}' in said


@pytest.mark.parametrize("code", PYTHON)
def test_python(served: Served, tmp_path: Path, code: str) -> None:
    said = run([sys.executable, "-c", code.replace("http://127.0.0.1:7777", served.url)], served, tmp_path)
    assert re.search(r"0\.\d+", said)


def test_the_commands_were_found() -> None:
    assert (len(SHELL), len(PYTHON)) == (4, 2)


def test_every_code_of_the_contract_is_in_the_table() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(line for line in TEXT.splitlines() if re.match(r"\| \d{3} \|", line))))
    assert {kind.code for kind in APIError.__subclasses__()} <= told
    for kind in APIError.__subclasses__():
        assert re.search(rf"^\| {kind.status} \| .*`{kind.code}`", TEXT, re.MULTILINE), kind.code
