"""`sakuradite batch`: its options reach the job, and what it says and how it ends is what was promised."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from sakuradite.batch import Progress, job
from sakuradite.batch.pipeline import Pool, Result, Work
from sakuradite.cli import batch as command
from tests.batch.conftest import Inline, inline, read_lines, replicas, write_lines
from tests.cli.conftest import Cli

__all__ = ["inline", "replicas"]  # fixtures of the bulk jobs' own tests
FAKE = ("-m", "fake", "--backend", "fake")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", *({"id": i, "text": f"state {i}"} for i in range(40)))


def test_a_job_is_told_in_a_line_and_ends_with_0(
    inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli
) -> None:
    result = cli("batch", source, tmp_path / "out.csv", "-q", questions, *FAKE, "--state-column", "text")
    assert (result.code, result.out) == (0, "")
    *phases, decided, writing, last = result.err.splitlines()
    assert phases == ["reading", "starting Ray and loading the model"]
    assert decided == "32 of 40 rows"
    assert writing == "writing"
    assert last.startswith(f"{tmp_path / 'out.csv'}: 40 rows, 0 with errors, ")


def test_a_cluster_that_is_joined_is_not_said_to_be_started(
    inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli
) -> None:
    options = ("--address", "10.0.0.1:6379", "--state-column", "text")
    result = cli("batch", source, tmp_path / "out.csv", "-q", questions, *FAKE, *options)
    assert result.code == 0
    assert result.err.splitlines()[1] == "joining the Ray cluster at 10.0.0.1:6379 and loading the model"


def test_json_is_a_summary_and_nothing_else(
    inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli
) -> None:
    result = cli("batch", source, tmp_path / "out.jsonl", "-q", questions, *FAKE, "--state-column", "text", "--json")
    summary = result.json
    assert list(summary) == ["output", "rows", "errors", "resumed", "input_tokens", "seconds"]
    assert (summary["output"], summary["rows"], summary["errors"]) == (str(tmp_path / "out.jsonl"), 40, 0)
    assert summary["input_tokens"] == sum(line["usage"]["input_tokens"] for line in read_lines(tmp_path / "out.jsonl"))


def test_rows_with_errors_are_told_by_the_exit_code(inline: Inline, questions: Path, tmp_path: Path, cli: Cli) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"state": "a"}, b"{bad")
    result = cli("batch", source, tmp_path / "out.jsonl", "-q", questions, *FAKE)
    assert result.code == 4
    assert "2 rows, 1 with errors" in result.err.splitlines()[-1]


def test_options_reach_the_model_and_the_output(
    inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Pool] = []

    def noting(work: Work, pool: Pool) -> Iterator[Result]:
        pools.append(pool)
        assert work.asked.column is None
        return inline(work, pool)

    monkeypatch.setattr(job, "run_pipeline", noting)
    options = ("--replicas", 2, "--num-cpus", 3, "--dtype", "float32", "--set", "max_batch_size=4", "--whole-row")
    assert cli("batch", source, tmp_path / "out.jsonl", "-q", questions, *FAKE, *options, "--keep", "id").code == 0
    (pool,) = pools
    assert (pool.replicas, pool.threads, pool.config.dtype, pool.config.max_batch_size) == ((2, 2), 3, "float32", 4)
    assert read_lines(tmp_path / "out.jsonl")[1]["row"] == {"id": 1}


def interrupt(monkeypatch: pytest.MonkeyPatch, inline: Inline, error: BaseException) -> None:
    def interrupted(work: Work, pool: Pool) -> Iterator[Result]:
        yield next(inline(work, pool))
        raise error

    monkeypatch.setattr(job, "run_pipeline", interrupted)


@pytest.mark.parametrize("restart", [False, True])
def test_ctrl_c_says_the_command_that_goes_on(
    restart: bool, inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = ["batch", str(source), str(tmp_path / "out 1.jsonl"), "-q", str(questions), *FAKE]
    monkeypatch.setattr(sys, "argv", ["sakuradite", *words, *(["--restart"] if restart else [])])
    interrupt(monkeypatch, inline, KeyboardInterrupt())
    result = cli(*sys.argv[1:])
    assert result.code == 130
    folder = tmp_path / "out 1.jsonl.batch"
    command = f"sakuradite batch {source} '{tmp_path / 'out 1.jsonl'}' -q {questions} -m fake --backend fake"
    assert result.err.splitlines()[-2:] == [
        f"what is done is kept in {folder}; go on with: {command}",
        "error: interrupted",
    ]
    monkeypatch.setattr(job, "run_pipeline", inline)
    assert cli(*words, "--json").json["resumed"] == 32


def test_a_failure_of_the_job_is_one_line_and_says_how_to_go_on(
    inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli
) -> None:
    model = ("-m", "fake?load_error=insufficient_resources", "--backend", "fake")
    result = cli("batch", source, tmp_path / "out.jsonl", "-q", questions, *model)
    assert result.code == 1
    told, last = result.err.splitlines()[-2:]
    assert told.startswith("what is done is kept in ")
    assert last == "error: fake?load_error=insufficient_resources was told to fail its load"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["missing.jsonl", "out.jsonl"], "missing.jsonl: No such file"),
        (["in.jsonl", "out.txt"], "must end in .jsonl, .csv or .parquet"),
        (["in.jsonl", "out.jsonl", "--set", "replicas=none"], "replicas: "),
        (["in.jsonl", "out.jsonl", "--replicas", "0"], "'--replicas': Input should be greater than or equal to 1"),
        (["in.jsonl", "out.jsonl", "-q", "wrong.json"], "wrong.json: questions.a"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    change: list[str], said: str, inline: Inline, source: Path, questions: Path, tmp_path: Path, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_bytes(orjson.dumps({"a": {"type": "nothing"}}))
    result = cli("batch", *change, *([] if "-q" in change else ["-q", questions]), *FAKE)
    assert result.code == 2
    assert said in result.err.splitlines()[-1]
    assert result.err.splitlines()[-1].startswith("error: ")


def test_without_a_model_the_ways_to_name_one_are_told(source: Path, questions: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("batch", source, tmp_path / "out.jsonl", "-q", questions)
    assert (result.code, "--model MODEL" in result.err) == (2, True)


class Terminal(io.StringIO):
    """A stderr that a person looks at."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_rows_rate_errors_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "150"}.items():
        monkeypatch.setenv(name, value)
    with command._progress() as report:
        report(Progress(phase="starting", total=1000))
        time.sleep(0.3)  # rich draws ten times a second
        report(Progress(phase="deciding", total=1000, done=100))
        report(Progress(phase="deciding", total=1000, done=500, errors=3))
        time.sleep(0.3)
    drawn = terminal.getvalue()
    assert "starting Ray and loading the model" in drawn
    assert "500 of 1000 rows, 3 with errors, " in drawn
    assert "/s, " in drawn
    assert " left" in drawn
    assert "50%" in drawn


def test_the_pace_counts_what_this_run_did(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pace = command._Pace()

    def words(seconds: float, **fields: Any) -> str:
        clock[0] = 100 + seconds
        return pace.words(Progress(total=1000, resumed=100, **fields))

    assert words(0, phase="starting", done=100) == "starting Ray and loading the model"
    assert words(20, phase="deciding", done=200) == "200 of 1000 rows"
    assert words(30, phase="deciding", done=300, errors=2) == "300 of 1000 rows, 2 with errors, 10.0/s, 1:10 left"
    assert words(31, phase="writing", done=1000) == "writing"
