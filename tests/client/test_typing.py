"""The types that callers see: example programs under mypy and under pyright's engine, both strict."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
GOOD = [PROGRAMS / name for name in ("synchronous.py", "asynchronous.py", "bare.py")]


@pytest.fixture
def mistakes(tmp_path: Path) -> Path:
    """A program whose lines marked WRONG must be refused."""
    path = tmp_path / "mistakes.py"
    path.write_text((PROGRAMS / "mistakes.txt").read_text())
    return path


def marked(path: Path) -> set[tuple[str, int]]:
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(path.name, number) for number, line in lines if line.endswith("# WRONG")}


def test_mypy_infers_the_types_and_refuses_the_mistakes(mistakes: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, GOOD), str(mistakes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\S+):(\d+): error", done.stdout, re.MULTILINE)
    assert {(Path(name).name, int(line)) for name, line in found} == marked(mistakes), done.stdout + done.stderr


def test_pyright_infers_the_types_and_refuses_the_mistakes(mistakes: Path, tmp_path: Path) -> None:
    settings = tmp_path / "pyrightconfig.json"
    include = [str(path) for path in (*GOOD, mistakes)]
    settings.write_bytes(orjson.dumps({"include": include, "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}))
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(settings),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    report = orjson.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(include)
    errors = [entry for entry in report["generalDiagnostics"] if entry["severity"] == "error"]
    found = {(Path(entry["file"]).name, entry["range"]["start"]["line"] + 1) for entry in errors}
    assert found == marked(mistakes), errors
