"""`doctor`: what it finds, and what it advises."""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Daemon


def findings(cli: Cli, *options: object) -> dict[str, dict[str, Any]]:
    found = cli(*options, "doctor", "--json").json["findings"]
    return {finding["subject"]: finding for finding in found}


def test_a_healthy_installation(cli: Cli, daemon: Daemon) -> None:
    found = findings(cli)
    assert found["platform"]["level"] == "ok"
    assert "torch" in found["[torch]"]["found"]
    assert "ready: tiny/fake" in found["daemon"]["found"]
    assert found["admin key"]["level"] == "ok"
    assert "SAKURADITE_BASE_URL" in found["settings"]["found"]
    shown = cli("doctor")
    assert shown.code == 0
    assert "ok      platform: Python 3." in shown.out


def test_no_daemon_is_a_note_and_its_port_is_looked_at(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = findings(cli, "--base-url", f"http://127.0.0.1:{port}")
    assert found["daemon"]["level"] == "note"
    assert found["port"]["found"] == f"{port} is free for: sakuradite serve"


def test_something_else_at_the_port_is_a_problem(cli: Cli) -> None:
    from tests.client.raw import RawServer, reply

    with RawServer([reply(200, b"<html>", "content-type: text/html")]) as other:
        found = findings(cli, "--base-url", other.url)
        assert cli("--base-url", other.url, "doctor").code == 1
    assert found["daemon"]["level"] == "problem"


def test_a_wrong_key_says_which(cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKURADITE_ADMIN_KEY", "sk-wrong")
    found = findings(cli)
    assert found["admin key"]["level"] == "note"
    assert "SAKURADITE_ADMIN_KEY" in found["admin key"]["advice"]


def test_a_home_and_a_key_that_others_can_reach(cli: Cli, daemon: Daemon, home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    (home / "admin.key").write_text("sk-admin\n")
    (home / "admin.key").chmod(0o644)
    found = findings(cli)
    assert found["home"] | {"level": "problem"} == found["home"]
    assert found["home"]["advice"] == f"chmod go-w {home}"
    assert "can be read by others" in found["admin.key"]["found"]
    assert cli("doctor").code == 1


def test_a_home_that_is_a_file(cli: Cli, daemon: Daemon, home: Path) -> None:
    home.write_text("")
    found = findings(cli)["home"]
    assert (found["level"], found["found"]) == ("problem", f"{home} is no folder")
    assert cli("doctor").code == 1


def test_a_home_that_cannot_be_looked_at(cli: Cli, daemon: Daemon, tmp_path: Path) -> None:
    found = findings(cli, "--home", tmp_path / ("a" * 300))["home"]
    assert (found["level"], "File name too long" in found["found"]) == ("problem", True)


def test_an_address_that_is_none_is_a_finding(cli: Cli) -> None:
    found = findings(cli, "--base-url", "http://127.0.0.1:77777")["daemon"]
    assert (found["level"], "is no URL: Port out of range" in found["found"]) == ("problem", True)


def test_a_wrong_config_file(cli: Cli, daemon: Daemon, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("modle = 1\n")
    assert "unknown key 'modle'" in findings(cli)["settings"]["found"]


def test_missing_extras_and_old_versions(cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    from sakuradite.cli import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module.startswith("mlx") else object())
    monkeypatch.setattr(doctor, "_version", lambda module: "2.9.1")
    found = findings(cli)
    assert found["[mlx]"]["advice"] == "pip install 'sakuradite[mlx]'"
    assert found["Ray"]["found"] == "version 2.9.1 is too old"


def test_every_extra_is_told_with_all_that_it_installs(cli: Cli, daemon: Daemon) -> None:
    """As pyproject.toml says; of [dev] the tools that everything else needs."""
    from sakuradite.cli.doctor import EXTRAS

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = findings(cli)
    assert [subject for subject in found if subject.startswith("[")] == [f"[{extra}]" for extra in EXTRAS]
    assert EXTRAS.keys() == extras.keys()
    modules = {"pillow": "PIL"}
    for extra, required in extras.items():
        purpose, known = EXTRAS[extra]
        assert found[f"[{extra}]"]["found"].startswith(f"{purpose}: ")
        names = [re.split(r"[\[>=]", requirement)[0] for requirement in required]
        needed = {modules.get(name, name.replace("-", "_")) for name in names}
        told = {module.replace(".", "_") for module in known}
        assert told <= needed if extra == "dev" else needed <= told


def test_what_is_missing_of_a_package_of_several_is_named(
    cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sakuradite.cli import doctor

    def find(module: str) -> object:
        if module.startswith("opentelemetry"):
            raise ModuleNotFoundError(module)  # as find_spec does where the parent is not there
        return object()

    monkeypatch.setattr(doctor, "find_spec", find)
    told = findings(cli)["[otel]"]
    assert told["level"] == "note"
    assert told["found"].startswith("traces by OpenTelemetry: not installed (opentelemetry.sdk, ")
    assert told["advice"] == "pip install 'sakuradite[otel]'"


def test_traces_that_are_asked_for_and_cannot_be_had_are_a_problem(
    cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "traces" not in findings(cli)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert findings(cli)["traces"]["level"] == "ok"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    traces = findings(cli)["traces"]
    assert traces["level"] == "problem"
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=grpc" in traces["found"]


def test_a_long_folder_for_sockets(cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/tmp/" + "x" * 60
    monkeypatch.setattr("tempfile.gettempdir", lambda: deep)
    found = findings(cli)["TMPDIR"]
    assert (found["level"], found["found"].endswith("; Ray's files go to /tmp")) == ("note", True)
    monkeypatch.setattr("sakuradite.cluster.local.short_place", lambda: None)
    found = findings(cli)["TMPDIR"]
    assert (found["level"], found["found"].startswith(deep)) == ("problem", True)
    assert "at most 24 bytes" in found["advice"]
