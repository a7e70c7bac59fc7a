"""Log lines: as text, as JSON, where they go, and what becomes of old files."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sakuradite.cluster import logs
from sakuradite.config import LogSettings, log_settings, server_settings
from sakuradite.errors import ConfigurationError
from tests.cluster.processes import eventually


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, put back as it was."""
    logger = logging.getLogger("sakuradite")
    before = logger.handlers, logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def written(settings: LogSettings, logger: logging.Logger) -> str:
    """What a line, a quiet one, and one with a traceback come out as."""
    handler = logs.start(settings, "router", "abc")
    stream = handler.out.setStream(io.StringIO()) if settings.directory is None else None
    fields = {"request_id": "r-1", "status": 200, "code": "", "seconds": 0.25}
    handler.tell("info", "sakuradite.access", "request", fields)
    logging.getLogger("sakuradite.access").debug("never")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("sakuradite.cluster.model").exception("a request failed")
    if stream is None:
        assert settings.directory is not None
        return (settings.directory / "router-abc.log").read_text()
    return str(handler.out.stream.getvalue())


def test_json_lines(logger: logging.Logger, tmp_path: Path) -> None:
    text = written(LogSettings(format="json", directory=tmp_path / "logs"), logger)
    request, failure = [json.loads(line) for line in text.splitlines()]
    assert request.pop("time").endswith("Z")
    assert request == {
        "level": "info", "logger": "sakuradite.access", "process": "router", "replica": "abc", "message": "request",
        "request_id": "r-1", "status": 200, "code": "", "seconds": 0.25,
    }  # fmt: skip
    assert failure["level"] == "error"
    assert failure["exception"].splitlines()[-1] == "ValueError: broken"


def test_text_lines_go_to_stderr_where_no_folder_is_named(logger: logging.Logger) -> None:
    first, failure, *trace = written(LogSettings(), logger).splitlines()
    assert first.split(" ", 1)[1] == "info router request request_id=r-1 status=200 seconds=0.25"
    assert failure.split(" ", 1)[1] == "error router a request failed"
    assert trace[-1] == "ValueError: broken"


def test_a_record_has_fields_of_its_own(logger: logging.Logger, tmp_path: Path) -> None:
    logs.start(LogSettings(format="json", directory=tmp_path), "catalog", "abc")
    logging.getLogger("sakuradite.cluster.catalog").info("%s it is", "operation", extra={"fields": {"kind": "load"}})
    line = json.loads((tmp_path / "catalog-abc.log").read_text())
    assert (line["message"], line["kind"], line["logger"]) == ("operation it is", "load", "sakuradite.cluster.catalog")


@pytest.fixture
def kept(logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[logs.Lines, Path]:
    """A log whose thread never comes to write, with two lines of requests told, and its file."""
    monkeypatch.setattr(logs, "TOGETHER_SECONDS", 600.0)
    lines = logs.start(LogSettings(directory=tmp_path), "model", "abc")
    for i in range(2):
        lines.tell("info", "sakuradite.decisions", "decision", {"request_id": f"r-{i}"})
    return lines, tmp_path / "model-abc.log"


def told(path: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


TWO = ["model decision request_id=r-0", "model decision request_id=r-1"]


def test_lines_of_requests_are_written_together(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = logs.start(LogSettings(directory=tmp_path), "model", "abc")
    writes: list[str] = []
    monkeypatch.setattr(lines.out, "handle", lambda record: writes.append(record.getMessage()))
    threads = [threading.Thread(target=_tell_a_hundred, args=(lines, i)) for i in range(3)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: "\n".join(writes).count("request_id") == 300)
    found = "\n".join(writes).splitlines()
    for i in range(3):
        assert [line.rsplit("-", 1)[1] for line in found if f"={i}-" in line] == [str(k) for k in range(100)]
    assert len(writes) < 150


def _tell_a_hundred(lines: logs.Lines, name: int) -> None:
    for k in range(100):
        lines.tell("info", "sakuradite.decisions", "decision", {"request_id": f"{name}-{k}"})


def test_another_line_takes_along_what_came_before_it(kept: tuple[logs.Lines, Path]) -> None:
    _, path = kept
    assert path.read_text() == ""
    logging.getLogger("sakuradite.engine").error("broken")
    assert told(path) == [*TWO, "model broken"]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_the_last_lines_are_written(end: str, kept: tuple[logs.Lines, Path]) -> None:
    getattr(kept[0], end)()
    assert told(kept[1]) == TWO


def test_more_lines_than_may_wait_are_written_at_once(
    kept: tuple[logs.Lines, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 2)
    kept[0].tell("info", "sakuradite.decisions", "decision", {"request_id": "r-2"})
    assert told(kept[1]) == [*TWO, "model decision request_id=r-2"]


def test_a_program_that_ends_has_written_its_lines(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sakuradite.cluster import logs; from sakuradite.config import *\n"
        "logs.TOGETHER_SECONDS = 600\n"
        "lines = logs.start(LogSettings(directory=Path(sys.argv[1])), 'model', 'abc')\n"
        "for i in range(2): lines.tell('info', 'sakuradite.decisions', 'decision', {'request_id': f'r-{i}'})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert told(tmp_path / "model-abc.log") == TWO


def test_a_folder_that_cannot_be_had_does_not_end_a_server(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    handler = logs.start(LogSettings(directory=tmp_path / "file"), "router", "abc")
    assert not isinstance(handler.out, logging.FileHandler)
    assert f"no log in {tmp_path / 'file'}: File exists; it goes to stderr" in capsys.readouterr().err


def test_a_full_file_is_followed_by_another(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 200)
    logs.start(LogSettings(directory=tmp_path), "router", "abc")
    for i in range(20):
        logging.getLogger("sakuradite.x").info("line %d", i)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["router-abc.log", "router-abc.log.1", "router-abc.log.2"]
    sizes = [(tmp_path / name).stat().st_size for name in files[1:]]
    assert all(200 <= size < 300 for size in sizes)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in files} == {0o600}
    assert "line 19" in "".join((tmp_path / name).read_text() for name in files)


def test_old_files_go(logger: logging.Logger, tmp_path: Path) -> None:
    for i in range(logs.MAX_FILES + 5):
        path = tmp_path / f"model-{i}.log"
        path.touch()
        os.utime(path, (i, i))
    for name in (others := {"notes.txt", "nginx.log", "training-model-1.log", "model-1.logs", "model-a-b.log"}):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    logs.start(LogSettings(directory=tmp_path), "router", "abc")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == others | {"router-abc.log"} | {f"model-{i}.log" for i in range(5, logs.MAX_FILES + 5)}


def test_what_is_told_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert log_settings() == LogSettings(format="text", level="info", directory=None)
    assert log_settings(default_level="warning").level == "warning"
    monkeypatch.setenv("SAKURADITE_LOG_FORMAT", "json")
    monkeypatch.setenv("SAKURADITE_LOG_LEVEL", "debug")
    monkeypatch.setenv("SAKURADITE_LOG_DIR", str(tmp_path))
    assert log_settings(default_level="warning") == LogSettings(format="json", level="debug", directory=tmp_path)
    assert log_settings("text", "error", "-") == LogSettings(format="text", level="error", directory=None)
    config = server_settings(tmp_path, log_level="error")
    assert (config.log_format, config.log_level, config.log_dir) == ("json", "error", tmp_path)


def test_a_value_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAKURADITE_LOG_FORMAT", "xml")
    with pytest.raises(ConfigurationError, match="SAKURADITE_LOG_FORMAT: Input should be 'text' or 'json'"):
        log_settings()
    with pytest.raises(ConfigurationError, match="log_format"):
        server_settings(tmp_path)
