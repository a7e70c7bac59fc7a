"""Each command once for people, once for scripts; and how commands end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sakuradite import __version__
from sakuradite.cli import main
from sakuradite.config import ModelConfig, ServerConfig
from sakuradite.errors import ConfigurationError, InvalidLifecycleError
from sakuradite.operations import OperationError
from tests.cli.conftest import Cli, Daemon
from tests.client.test_public import HEAVY, loaded
from tests.http.serving import MODEL

ROOT = Path(__file__).parents[2]


def test_ps(cli: Cli, daemon: Daemon) -> None:
    shown = cli("ps")
    assert shown.code == 0
    header, row = shown.out.splitlines()
    assert header.split("\t")[:3] == ["MODEL", "STATUS", "REPLICAS"]
    assert row.split("\t")[:4] == [MODEL, "ready", "0/0", "fake"]
    assert [status["model"] for status in cli("ps", "--json").json] == [MODEL]


def test_ps_says_why_questions_share_no_prefix(cli: Cli, daemon: Daemon) -> None:
    daemon.found = {"prefix_reuse": "padded: its key/value cache is quantised"}
    assert cli("ps").out.splitlines()[-1] == f"{MODEL}: no prefix reuse: its key/value cache is quantised"
    daemon.found = {"prefix_reuse": "packed: full attention in every layer"}
    assert "no prefix reuse" not in cli("ps").out


def test_list(cli: Cli, daemon: Daemon) -> None:
    shown = cli("list")
    assert shown.out.splitlines()[1].split("\t") == ["org/stored", "273 MB", "0123456789ab", "here", "unloaded"]
    assert cli("list", "--json").json[0]["storage"]["bytes"] == 273_000_000


def test_inspect(cli: Cli, daemon: Daemon) -> None:
    shown = cli("inspect", "a/b", "--revision", "v1", "--offline")
    assert daemon.calls == [("inspect", "a/b", "v1", True)]
    assert "architecture\tQwen3ForCausalLM" in shown.out
    assert "parameters\t596,049,920" in shown.out
    assert "not calibrated" in shown.out
    assert cli("inspect", "a/b", "--json").json["calibrated"] is False


def test_load_tells_progress_on_stderr(cli: Cli, daemon: Daemon) -> None:
    loaded = cli(
        "load", MODEL, "--backend", "fake", "--dtype", "float32", "--set", "replicas=2", "--set", "placement={}"
    )
    assert loaded.code == 0
    assert loaded.out == f"{MODEL} is loaded\n"
    assert loaded.err.splitlines() == [f"{MODEL}: downloading 1.0 MB of 4.0 MB"]
    assert daemon.calls[0] == ("load", ModelConfig(model=MODEL, backend="fake", dtype="float32", replicas=2))


def test_load_and_ps_tell_what_the_model_warns_of(cli: Cli, daemon: Daemon) -> None:
    daemon.found = {"warnings": ("its labels had 0.2 % of the mass",)}
    said = f"{MODEL}: warning: its labels had 0.2 % of the mass"
    loaded = cli("load", MODEL)
    assert (loaded.code, loaded.out, loaded.err.splitlines()[-1]) == (0, f"{MODEL} is loaded\n", said)
    assert cli("ps").out.splitlines()[-1] == said
    assert said not in cli("load", MODEL, "--json").err


def test_load_as_json_prints_the_operation_alone(cli: Cli, daemon: Daemon) -> None:
    loaded = cli("load", MODEL, "--json")
    assert loaded.json["status"] == "succeeded"
    assert cli("load", MODEL, "--no-wait", "--json").json["status"] == "pending"
    assert cli("load", MODEL, "--no-wait").out == "op_2\n"


def test_a_failed_load_is_one_line_and_its_own_error(cli: Cli, daemon: Daemon) -> None:
    daemon.ends = OperationError(code="unsupported_model", message="no fast\ntokenizer", status_code=422)
    failed = cli("load", MODEL)
    assert (failed.code, failed.out) == (1, "")
    assert failed.err.splitlines()[-1] == "error: no fast tokenizer"


def test_pull(cli: Cli, daemon: Daemon) -> None:
    assert cli("pull", MODEL, "--revision", "v2").out == f"{MODEL} is downloaded\n"
    assert daemon.calls[0] == ("pull", MODEL, "v2", False)


def test_unload_and_rm(cli: Cli, daemon: Daemon) -> None:
    assert cli("unload", MODEL).out == f"{MODEL} is unloaded\n"
    assert cli("unload", MODEL, "--json").json["status"] == "unloaded"
    assert cli("rm", "a/b").out == "a/b is removed\n"
    assert cli("rm", "a/b", "--json").json == {"model": "a/b", "status": "removed"}
    refused = cli("rm", MODEL)
    assert (refused.code, refused.err) == (1, f"error: {MODEL} is loaded; unload it first\n")


def test_alias(cli: Cli, daemon: Daemon) -> None:
    assert cli("alias", "small", MODEL).code == 0
    assert f"small\t{MODEL}" in cli("alias").out
    assert {"alias": "small", "model": MODEL} in cli("alias", "--json").json
    assert cli("alias", "small", "--remove").code == 0
    assert "small" not in cli("alias").out
    for wrong in (("small",), ("--remove",), ("a", "b", "--remove")):
        assert cli("alias", *wrong).code == 2


def test_an_error_of_the_daemon_is_code_1(cli: Cli, daemon: Daemon) -> None:
    daemon.error = InvalidLifecycleError("it is loaded with another configuration")
    assert cli("load", MODEL).code == 1


def test_a_local_path_is_sent_absolute(
    cli: Cli, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    cli("inspect", "./checkpoint")
    cli("inspect", "org/checkpoint")
    assert [call[1] for call in daemon.calls] == [str(tmp_path / "checkpoint"), "org/checkpoint"]


# How commands end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frob"], "No such command 'frob'"),
        (["ps", "--frob"], "No such option"),
        (["load"], "Missing argument 'MODEL'"),
        (["load", "m", "--set", "replicas"], "--set takes KEY=VALUE with a field of ModelConfig"),
        (["load", "m", "--set", "replica=2"], "--set takes KEY=VALUE with a field of ModelConfig"),
        (["load", "m", "--set", "replicas=no"], "replicas: Input should be a valid integer"),
        (["load", "m", "--set", 'replicas={"min": 1}'], "replicas.max: Field required"),
        (["load", "m", "--set", 'replicas={"min": 3, "max": 2}'], "replicas: Value error, replicas.min (3) is above"),
        (["load", "m", "--dtype", "float8"], "dtype: Input should be"),
        (["serve", "--port", "70000"], "Invalid value for '--port'"),
        (["--base-url", "nowhere", "ps"], "base_url must start with http"),
        (["--base-url", "http://127.0.0.1:77777", "ps"], "base_url 'http://127.0.0.1:77777' is no URL: Port out of"),
        (["--base-url", "http://127.0.0.1:port", "ps"], "base_url 'http://127.0.0.1:port' is no URL: Port could"),
        (["--base-url", "http://[::1", "ps"], "base_url 'http://[::1' is no URL: Invalid IPv6"),
        (["--base-url", "http://a\tb", "ps"], "base_url 'http://a\\tb' is no URL: Invalid non-printable"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(cli: Cli, daemon: Daemon, arguments: list[str], message: str) -> None:
    wrong = cli(*arguments)
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err.startswith(f"error: {message}")
    assert wrong.err.count("\n") == 1
    assert daemon.calls == []


def test_no_daemon_is_code_3_and_says_how_to_start_one(cli: Cli) -> None:
    gone = cli("--base-url", "http://127.0.0.1:9", "ps")
    assert gone.code == 3
    assert gone.err == (
        "error: cannot reach http://127.0.0.1:9: Connection refused; "
        "is the daemon running? Start it with: sakuradite serve\n"
    )


def test_the_proxy_of_the_environment_is_not_for_loopback(
    cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    assert cli("ps").code == 0


def test_a_wrong_config_file_is_code_2(cli: Cli, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("model = \n")
    wrong = cli("ps")
    assert wrong.code == 2
    assert "config.toml: Invalid value (at line 1, column 9)" in wrong.err


def test_home_and_base_url_may_be_given_before_the_command(cli: Cli, daemon: Daemon, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text('base_url = "http://127.0.0.1:9"\nadmin_key = "x"\n')
    assert cli("--home", other, "ps").code == 0  # the environment's URL wins over the file's, its key over the file's
    assert cli("--home", other, "--base-url", "http://127.0.0.1:9", "ps").code == 3


def test_serve_on_windows_says_where_it_works(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakuradite.cli.serve.sys.platform", "win32")
    refused = cli("serve")
    assert refused.code == 2
    assert "WSL2 or in a container" in refused.err


def test_serve_without_its_extra_names_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakuradite.cli.serve.find_spec", lambda module: None)
    refused = cli("serve")
    assert refused.code == 2
    assert refused.err == "error: serve needs the extra [server]: pip install 'sakuradite[server]'\n"


def test_serve_passes_its_options_on(cli: Cli, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    seen: list[tuple[ServerConfig, bool]] = []

    def daemon(config: ServerConfig, restore: bool) -> None:
        seen.append((config, restore))
        raise ConfigurationError("127.0.0.1:7800 is in use")

    monkeypatch.setattr("sakuradite.cluster.daemon.serve", daemon)
    monkeypatch.setenv("SAKURADITE_API_KEY", "sk-1")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ended = cli("serve", "--host", "0.0.0.0", "--port", "7800", "--restore")
    assert (ended.code, ended.err) == (2, "error: 127.0.0.1:7800 is in use\n")
    ((config, restore),) = seen
    assert (config.host, config.port, config.home, config.api_key) == ("0.0.0.0", 7800, home, "sk-1")
    assert (config.address, restore) == ("auto", True)


# Help and start-up


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"sakuradite {__version__}\n"


def test_bare_without_a_terminal_prints_help(cli: Cli) -> None:
    shown = cli()
    assert shown.code == 0
    assert shown.out.startswith("Usage: sakuradite [OPTIONS] COMMAND")
    assert "Exit codes: 0 done" in shown.out
    assert cli("--help").out.strip() == shown.out.strip()


def test_python_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "sakuradite", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"sakuradite {__version__}\n"


def test_help_imports_nothing_that_it_does_not_need() -> None:
    code = "from sakuradite.cli.exits import run; run(['--help'])"
    assert loaded(code) & (HEAVY | {"asyncio", "orjson"}) == {"typer"}


def test_ps_imports_no_runtime(daemon: Daemon) -> None:
    code = "from sakuradite.cli.exits import run; assert run(['ps']) == 0"
    assert loaded(code) & (HEAVY - {"typer", "pydantic", "httpx", "rich"}) == set()


def test_a_reader_that_goes_away_is_no_error(daemon: Daemon) -> None:
    command = f"{sys.executable} -m sakuradite ps --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_modules_are_imported_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt  # as in `run`'s own import of the commands

    monkeypatch.setattr("sakuradite.cli.exits.run", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["ps"])
    assert (end.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")


def test_completion_scripts_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    environment = os.environ | {
        "_SAKURADITE_COMPLETE": "complete_bash",
        "COMP_WORDS": "sakuradite un",
        "COMP_CWORD": "1",
    }
    command = [sys.executable, "-c", "from sakuradite.cli import main; main()"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["unload"]
