"""`run`: states and questions from the command line, files and pipes; lines in, lines out, and going on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest

from sakuradite.cli.exits import UsageError
from sakuradite.config import ModelConfig
from sakuradite.records import Outcome, RequestRecord
from tests.cli.conftest import QUESTIONS, Cli, Daemon
from tests.client.test_request import PNG
from tests.http.serving import MODEL, ScriptedGateway, even, serve
from tests.photographs import REFUSED, TAKEN


def lines(text: str) -> list[Any]:
    return [orjson.loads(line) for line in text.splitlines()]


def test_a_decision_is_printed_as_json(cli: Cli, daemon: Daemon, questions: Path) -> None:
    done = cli("run", MODEL, "--questions", questions, "--state", "The parcel is broken.")
    assert done.code == 0
    assert done.err == ""
    assert list(done.json["answers"]) == list(QUESTIONS)
    assert daemon.calls == []  # resident: nothing to load
    assert cli("run", MODEL, "-q", questions, "--state", "The parcel is broken.", "--json").json == done.json


def test_the_state_may_come_from_a_file_or_a_pipe(cli: Cli, daemon: Daemon, questions: Path, tmp_path: Path) -> None:
    text, data = tmp_path / "state.txt", tmp_path / "state.json"
    text.write_text('{"a": 1}')
    data.write_text('{"a": 1}')
    asked = ["run", MODEL, "-q", questions]
    as_text = cli(*asked, "--state", '{"a": 1}').json
    assert cli(*asked, "--state-file", text).json == as_text
    assert cli(*asked, stdin='{"a": 1}').json == as_text
    assert cli(*asked, "--state-file", data).json != as_text  # a JSON state is rendered compactly


def test_the_model_may_come_from_the_settings(
    cli: Cli, daemon: Daemon, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = cli("run", "-q", questions, "--state", "x")
    assert (missing.code, "SAKURADITE_MODEL" in missing.err) == (2, True)
    monkeypatch.setenv("SAKURADITE_MODEL", MODEL)
    assert cli("run", "-q", questions, "--state", "x").json["model"] == MODEL


def test_a_model_that_is_not_resident_is_loaded_first(cli: Cli, daemon: Daemon, questions: Path) -> None:
    done = cli("run", "org/absent", "-q", questions, "--state", "x")
    assert daemon.calls[0] == ("load", ModelConfig(model="org/absent"))
    assert "downloading" in done.err
    assert done.code == 1  # this daemon only says that it loads


def test_options_are_compared_with_what_is_resident(cli: Cli, daemon: Daemon, questions: Path) -> None:
    cli("run", MODEL, "-q", questions, "--state", "x", "--dtype", "float32")
    assert daemon.calls[0] == ("load", ModelConfig(model=MODEL, dtype="float32"))


def test_stream_prints_events_as_lines(cli: Cli, daemon: Daemon, questions: Path) -> None:
    events = lines(cli("run", MODEL, "-q", questions, "--state", "x", "--stream").out)
    assert [event["type"] for event in events] == ["answer"] * 3 + ["complete"]
    assert {event["key"] for event in events[:3]} == set(QUESTIONS)


def test_table_prints_bars(cli: Cli, daemon: Daemon, questions: Path) -> None:
    shown = cli("run", MODEL, "-q", questions, "--state", "x", "--table").out
    assert "refund" in shown
    assert "█" in shown
    assert "0 can wait" in shown


def test_images_are_sent(cli: Cli, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "dot.png"
    image.write_bytes(PNG)
    with serve(ScriptedGateway()) as served:
        asked = ["--base-url", served.url, "run", MODEL, "-q", questions, "--state", "x"]
        assert cli(*asked, "--image", image, "--image", image).code == 0
        assert served.gateway.requests[0].images == (PNG, PNG)
        wrong = cli(*asked, "--image", tmp_path / "absent.png")
    assert (wrong.code, "images[0]" in wrong.err) == (2, True)


def test_image_files_are_checked_before_they_are_sent(cli: Cli, questions: Path, tmp_path: Path) -> None:
    good, other = tmp_path / "good.png", tmp_path / "other"
    good.write_bytes(PNG)
    with serve(ScriptedGateway()) as served:
        asked = ["--base-url", served.url, "run", MODEL, "-q", questions, "--state", "x", "--image", good]
        for name, (data, reason) in REFUSED.items():
            other.write_bytes(data)
            wrong = cli(*asked, "--image", other)
            assert (wrong.code, wrong.out) == (2, ""), name
            assert "images[1]" in wrong.err, name
            assert reason in wrong.err, name
            assert len(wrong.err.splitlines()) == 1, name
        assert served.gateway.requests == []
        for name, (data, _, _) in TAKEN.items():
            other.write_bytes(data)
            assert cli(*asked, "--image", other).code == 0, name
            assert served.gateway.requests[-1].images == (PNG, data), name


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"[]", "must hold a JSON object of questions"),
        (b"{", "Not valid JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key"),
        (None, "No such file"),
    ],
)
def test_a_wrong_questions_file_is_named(
    cli: Cli, daemon: Daemon, tmp_path: Path, file: bytes | None, message: str
) -> None:
    path = tmp_path / "wrong.json"
    if file is not None:
        path.write_bytes(file)
    wrong = cli("run", MODEL, "-q", path, "--state", "x")
    assert wrong.code == 2
    assert wrong.err.startswith(f"error: {path}: ")
    assert message in wrong.err


def test_a_wrong_question_is_told_by_its_path(cli: Cli, daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text('{"q": {"type": "noul", "instruction": "x"}}')
    for how in (("--state", "x"), ("--local", "--state", "x"), ("--jsonl",)):
        wrong = cli("run", "org/absent", "-q", path, *how)
        assert (wrong.code, wrong.err) == (2, f"error: {path}: questions.q.instruction: Unknown field\n")
    assert daemon.calls == []  # no model is loaded for it


def test_options_that_contradict_are_refused(cli: Cli, daemon: Daemon, questions: Path, tmp_path: Path) -> None:
    asked = ["run", MODEL, "-q", questions]
    text = tmp_path / "latin.txt"
    text.write_bytes("café".encode("latin-1"))
    for wrong in (
        ["--state", "x", "--state-file", text],
        ["--state-file", text],
        ["--jsonl", "--state", "x"],
        ["--jsonl", "--stream"],
        ["--jsonl", "--resume"],
        ["--state", "x", "--output", "out"],
    ):
        assert cli(*asked, *wrong).code == 2
    assert cli("--base-url", "http://x", *asked, "--state", "x", "--local").code == 2


def test_local_is_embedded_whatever_the_environment_says(
    cli: Cli, daemon: Daemon, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def no_ray(self: Any) -> Any:
        opened.append((self._settings.base_url, self._config))
        raise UsageError("enough seen")

    monkeypatch.setattr("sakuradite.client.sakuradite.Sakuradite.open", no_ray)
    cli("run", "--local", "m", "-q", questions, "--state", "x", "--device", "cpu", "--set", "max_batch_size=4")
    assert opened == [("", ModelConfig(model="m", device="cpu", max_batch_size=4))]


# Lines


def test_a_result_a_line_in_order(cli: Cli, daemon: Daemon, questions: Path) -> None:
    done = cli("run", MODEL, "-q", questions, "--jsonl", stdin='"a"\n\n{"b": 1}\n["c"]')
    rows = lines(done.out)
    assert [row["line"] for row in rows] == [1, 3, 4]
    assert all(list(row["answers"]) == list(QUESTIONS) for row in rows)
    assert (done.code, done.err) == (0, "3 lines done, 0 refused\n")


def test_a_field_may_be_the_state(cli: Cli, daemon: Daemon, questions: Path) -> None:
    whole = lines(cli("run", MODEL, "-q", questions, "--jsonl", stdin='"a"\n').out)
    done = cli("run", MODEL, "-q", questions, "--jsonl", "--field", "text", stdin='{"id": 7, "text": "a"}\n{"id": 8}\n')
    rows = lines(done.out)
    assert rows[0]["answers"] == whole[0]["answers"]
    assert rows[1]["error"] == {
        "code": "validation_error",
        "message": "text: the line is no object with this field",
    }


def test_lines_that_are_refused_are_values_and_code_1(cli: Cli, daemon: Daemon, questions: Path) -> None:
    done = cli("run", MODEL, "-q", questions, "--jsonl", stdin='{"a": 1, "a": 2}\n3\n"good"\n')
    assert ["error" in row for row in lines(done.out)] == [True, True, False]
    assert (done.code, done.err) == (1, "3 lines done, 2 refused\n")


def test_resume_goes_on_after_a_cut_line(cli: Cli, daemon: Daemon, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = ["run", MODEL, "-q", questions, "--jsonl", "--output", out]
    states = "".join(f'"state {i}"\n' for i in range(40))
    assert cli(*asked, stdin=states).code == 0
    whole = out.read_bytes()
    assert cli(*asked, stdin=states).code == 2  # it exists
    assert out.read_bytes() == whole
    cut = whole[: len(whole) // 2]
    assert not cut.endswith(b"\n")
    out.write_bytes(cut)
    resumed = cli(*asked, "--resume", stdin=states)
    assert resumed.code == 0
    assert out.read_bytes() == whole
    assert int(resumed.err.split()[0]) == 40 - cut.count(b"\n")
    assert cli(*asked, "--resume", stdin=states).err == "0 lines done, 0 refused\n"


def test_resume_with_another_input_or_questions_is_refused(
    cli: Cli, daemon: Daemon, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    asked = ["run", MODEL, "-q", questions, "--jsonl", "--output", out, "--resume"]
    assert cli(*asked, stdin='"a"\n"b"\n').code == 0
    before = out.read_bytes()
    other = cli(*asked, stdin='"a"\n"c"\n')
    assert (other.code, "line 2 was made from another input, model or questions" in other.err) == (2, True)
    questions.write_text('{"q": {"type": "noul"}}')
    assert cli(*asked, stdin='"a"\n"b"\n').code == 2
    assert out.read_bytes() == before
    out.write_text("something else\n")
    assert "is not of `run --jsonl`" in cli(*asked, stdin='"a"\n').err


def test_a_daemon_that_goes_away_ends_the_run_where_resume_goes_on(
    cli: Cli, daemon: Daemon, questions: Path, tmp_path: Path
) -> None:
    async def until_three(request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        if request.state[0] == "state 3":
            raise ConnectionError
        yield [even(request, i) for i in range(3)]

    out = tmp_path / "out.jsonl"
    states = "".join(f'"state {i}"\n' for i in range(9))
    asked = ["run", MODEL, "-q", questions, "--jsonl", "--output", out, "--concurrency", "1"]
    with serve(ScriptedGateway(until_three)) as served:
        first = cli("--base-url", served.url, *asked, stdin=states)
        assert (first.code, lines(out.read_text())[3]["error"]["code"]) == (1, "internal_error")
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:3]))
    gone = cli("--base-url", served.url, *asked, "--resume", stdin=states)
    assert gone.code == 3
    assert len(lines(out.read_text())) == 3
    with serve(ScriptedGateway()) as served:
        assert cli("--base-url", served.url, *asked, "--resume", stdin=states).code == 0
    assert [row["line"] for row in lines(out.read_text())] == list(range(1, 10))


LONG = 1180591620717411303424  # 2**70, as identifiers in other systems are


@pytest.mark.parametrize("how", [(), ("--stream",), ("--table",), ("--jsonl",)])
def test_long_integers_come_back_with_every_digit(
    cli: Cli, daemon: Daemon, tmp_path: Path, how: tuple[str, ...]
) -> None:
    path = tmp_path / "questions.json"
    path.write_text(
        f'{{"q": {{"type": "score", "instructions": {{"id": {LONG}}}, "criteria": [{{"id": {LONG}}}, "b"]}}}}'
    )
    state = () if how == ("--jsonl",) else ("--state", "x")
    done = cli("run", MODEL, "-q", path, *state, *how, stdin=f'{{"id": {LONG}}}\n')
    assert done.code == 0, done.err
    assert str(LONG) in done.out
