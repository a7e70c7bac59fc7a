"""Commands in a real terminal: bars that move, tables that fit, a shell that completes, Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from sakuradite.cli.output import print_table
from tests.cli.conftest import Daemon
from tests.cli.terminal import Terminal
from tests.http.serving import MODEL

pytestmark = pytest.mark.timeout(120)


def test_load_shows_a_bar_with_bytes_rate_and_time(daemon: Daemon) -> None:
    with Terminal("load", MODEL, columns=120) as terminal:
        terminal.expect("downloading")
        terminal.expect("4.0 MB")
        terminal.expect("MB/s")
        terminal.expect(f"{MODEL} is loaded")
        assert terminal.end() == 0


def test_tables_fit_the_terminal(daemon: Daemon) -> None:
    with Terminal("ps", columns=60) as terminal:
        assert terminal.end() == 0
    lines = terminal.shown.rstrip().splitlines()
    assert max(len(line) for line in lines) <= 60, lines
    assert lines[0].startswith("MODEL")
    assert lines[1].split()[0] == MODEL
    assert lines[2].startswith("no room for ")
    assert lines[2].endswith("LOADED; --json has everything")
    with Terminal("alias", columns=60) as terminal:
        assert terminal.end() == 0
    assert MODEL in terminal.shown


def test_a_long_path_does_not_take_the_room_of_all_other_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sakuradite.cli.output.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(
        ("MODEL", "STATUS", "DEVICE"), [("/home/somebody/models/of/many/kinds/SmolLM2-135M", "ready", "cpu")], ""
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["MODEL", "STATUS", "DEVICE"], ["…/SmolLM2-135M", "ready", "cpu"]]


def test_a_decision_is_indented_for_people(daemon: Daemon, questions: Path) -> None:
    with Terminal("run", MODEL, "-q", questions, "--state", "x") as terminal:
        assert terminal.end() == 0
    assert terminal.shown.startswith('{\n  "model"')


def test_no_state_in_a_terminal_does_not_wait_for_one(daemon: Daemon, questions: Path) -> None:
    with Terminal("run", MODEL, "-q", questions) as terminal:
        assert terminal.end() == 2
    assert "error: no state: give --state TEXT" in terminal.shown


def test_lines_from_a_file_show_a_bar(daemon: Daemon, questions: Path, tmp_path: Path) -> None:
    states, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    states.write_bytes(b"".join(orjson.dumps(f"state {i}") + b"\n" for i in range(50)))
    with Terminal("run", MODEL, "-q", questions, "--jsonl", "-o", out, stdin=states) as terminal:
        terminal.expect("100%")
        terminal.expect("50 lines done, 0 refused")
        assert terminal.end() == 0
    assert len(out.read_bytes().splitlines()) == 50


def test_ctrl_c_during_a_load_says_that_it_goes_on(daemon: Daemon) -> None:
    daemon.steps, steps = daemon.steps * 100, daemon.steps
    try:
        with Terminal("load", MODEL) as terminal:
            terminal.expect("downloading")
            terminal.press("\x03")
            assert terminal.end() == 130
    finally:
        daemon.steps = steps
    assert f"the load goes on; end it with: sakuradite unload {MODEL}" in terminal.shown
    assert "error: interrupted" in terminal.shown
    assert "Traceback" not in terminal.shown


def test_the_shell(daemon: Daemon, home: Path, questions: Path) -> None:
    with Terminal() as terminal:
        terminal.expect("Tab completes")
        terminal.expect("sakuradite>")
        terminal.press("noul It is broken\r")
        terminal.expect("error: there is nothing to decide on yet: state TEXT")
        terminal.press("state The parcel arrived broken.\r")
        terminal.expect("state: The parcel arrived broken.")
        terminal.press("noul It is broken\r")
        terminal.expect(" true)")
        terminal.expect("█")
        terminal.press("choice Which team? | billing: invoices | shipping\r")
        terminal.expect("(confidence ")
        terminal.expect("shipping")
        terminal.press("score How urgent? | can wait | now\r")
        terminal.expect(" of 1 (confidence ")
        terminal.press(f"questions {questions}\r")
        terminal.expect("urgency")
        terminal.expect("sakuradite>")
        terminal.press("unl\t")  # a command, then a model's name
        terminal.expect("oad")
        terminal.press(" ti\t")
        terminal.expect("ny/fake")
        terminal.press("\r")
        terminal.expect(f"{MODEL} is unloaded")
        terminal.press("run --qu\t")
        terminal.expect("estions")
        terminal.press("\x03")
        terminal.press("ps --json\r")
        terminal.expect('"status": "ready"')
        terminal.press("choice Which? | a | a\r")
        terminal.expect("error: each option needs a name of its own")
        terminal.press("frob\r")
        terminal.expect("error: No such command 'frob'")
        terminal.press("load 'x\r")
        terminal.expect("error: No closing quotation")
        terminal.press("help\r")
        terminal.expect("COMMAND --help explains one.")
        terminal.expect("sakuradite>")
        terminal.press("\x04")
        assert terminal.end() == 0
    history = home / "history"
    assert "+state The parcel arrived broken." in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    with Terminal() as terminal:
        terminal.expect("sakuradite>")
        terminal.press("\x1b[A")  # up: the last line of the last time
        terminal.expect("help")
        terminal.press("\x03exit\r")
        assert terminal.end() == 0


def test_the_shell_without_a_daemon_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKURADITE_BASE_URL", "http://127.0.0.1:9")
    with Terminal() as terminal:
        terminal.expect("sakuradite>")
        terminal.press("ps\r")
        terminal.expect("error: cannot reach http://127.0.0.1:9")
        terminal.press("state x\r")
        terminal.expect("state: x")
        terminal.press("noul y\r")
        terminal.expect("error: cannot reach http://127.0.0.1:9")
        terminal.press("exit\r")
        assert terminal.end() == 0
    assert os.environ["SAKURADITE_BASE_URL"]


def test_ctrl_c_between_lines_keeps_what_is_done(daemon: Daemon, questions: Path, tmp_path: Path) -> None:
    states, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    states.write_bytes(b"".join(orjson.dumps(f"state {i}") + b"\n" for i in range(100_000)))
    asked = ("run", MODEL, "-q", questions, "--jsonl", "-o", out, "--resume")
    with Terminal(*asked, stdin=states) as terminal:
        terminal.expect("/s")
        terminal.press("\x03")
        assert terminal.end() == 130
    assert terminal.shown.rstrip().endswith("error: interrupted")
    assert "Traceback" not in terminal.shown
    rows = [orjson.loads(row) for row in out.read_bytes().splitlines()]
    assert [row["line"] for row in rows] == list(range(1, len(rows) + 1))
