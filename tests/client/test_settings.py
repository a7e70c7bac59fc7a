"""Where a client runs: the order of the settings, contradictions, and what `describe` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sakuradite import ModelConfig, Sakuradite
from sakuradite.client.embedded import EmbeddedTransport
from sakuradite.client.http import HTTPTransport
from sakuradite.errors import ConfigurationError, MissingExtraError
from tests.client.conftest import QUESTIONS


def config(home: Path, text: str) -> None:
    (home / "config.toml").write_text(text)


def test_embedded_without_a_base_url() -> None:
    description = Sakuradite("m").describe()
    assert (description.runs, description.why) == ("embedded", "no base_url is set")
    assert description.settings["model"] == ("m", "argument")
    assert isinstance(Sakuradite("m")._transport(), EmbeddedTransport)


def test_an_argument_wins_over_the_environment_over_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(home, 'model = "file"\nbase_url = "http://file:1"\ntimeout = 7.0\n')
    from_file = Sakuradite().describe()
    assert from_file.why == f"base_url is http://file:1 ({home / 'config.toml'})"
    assert from_file.settings["timeout"] == ("7.0", str(home / "config.toml"))
    monkeypatch.setenv("SAKURADITE_MODEL", "environment")
    monkeypatch.setenv("SAKURADITE_BASE_URL", "http://environment:1")
    from_environment = Sakuradite().describe()
    assert from_environment.why == "base_url is http://environment:1 (SAKURADITE_BASE_URL)"
    assert from_environment.settings["model"] == ("environment", "SAKURADITE_MODEL")
    explicit = Sakuradite("mine", base_url="http://mine:1")
    assert explicit.describe().why == "base_url is http://mine:1 (argument)"
    assert isinstance(explicit._transport(), HTTPTransport)


def test_another_home_has_another_file(tmp_path: Path) -> None:
    config(tmp_path, 'model = "there"\n')
    assert Sakuradite(home=tmp_path).describe().settings["model"] == ("there", str(tmp_path / "config.toml"))


def test_an_empty_base_url_says_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKURADITE_BASE_URL", "http://environment:1")
    description = Sakuradite("m", base_url="", backend="torch").describe()
    assert (description.runs, description.why) == ("embedded", "base_url is empty (argument)")


def test_keys_are_never_shown() -> None:
    client = Sakuradite("m", base_url="http://x", api_key="sk-secret", admin_key="sk-other")
    shown = f"{client.describe()} {client.describe()!r} {client!r}"
    assert "sk-" not in shown
    assert client.describe().settings["api_key"] == ("set", "argument")
    assert "api_key = set (argument)" in str(client.describe())


@pytest.mark.parametrize(
    "embedded", [{"backend": "torch"}, {"device": "cpu"}, {"dtype": "float32"}, {"revision": "v1"}, {"offline": True}]
)
def test_a_base_url_set_by_accident_is_named(monkeypatch: pytest.MonkeyPatch, embedded: dict[str, Any]) -> None:
    monkeypatch.setenv("SAKURADITE_BASE_URL", "http://environment:1")
    name = next(iter(embedded))
    expected = rf'{name}= is about embedded use.*http://environment:1 \(SAKURADITE_BASE_URL\).*pass base_url=""'
    with pytest.raises(ConfigurationError, match=expected):
        Sakuradite("m", **embedded)
    with pytest.raises(ConfigurationError, match="leave out base_url="):
        Sakuradite("m", base_url="http://x", **embedded)


def test_a_model_config_is_embedded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="is about embedded use"):
        Sakuradite(ModelConfig(model="m"), base_url="http://x")
    with pytest.raises(ConfigurationError, match="backend= is given twice"):
        Sakuradite(ModelConfig(model="m"), backend="torch")


def test_loading_options_of_the_file_are_no_contradiction(home: Path) -> None:
    config(home, 'backend = "torch"\n')
    assert Sakuradite("m", base_url="http://x").describe().runs == "http"


def test_a_wrong_file_is_named(home: Path) -> None:
    config(home, 'modle = "x"\n')
    with pytest.raises(ConfigurationError, match=r"config\.toml: unknown key 'modle'"):
        Sakuradite()


def test_a_value_that_no_model_can_have_is_named(home: Path) -> None:
    config(home, 'dtype = "float8"\n')
    with pytest.raises(ConfigurationError, match=r"dtype \(.*config\.toml\): Input should be 'auto', 'float32'"):
        Sakuradite("m").open()


def test_no_model_names_the_ways_to_set_one(home: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"SAKURADITE_MODEL.*config\.toml.*SAKURADITE_BASE_URL"):
        Sakuradite().open()
    client = Sakuradite()
    with pytest.raises(ConfigurationError, match=r"no model is set: pass model=.*SAKURADITE_MODEL.*config\.toml"):
        client.decide("x", QUESTIONS)
    client.close()


def test_negative_retries_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="retries must not be negative"):
        Sakuradite("m", retries=-1)


@pytest.mark.parametrize(
    ("backend", "missing", "extra"),
    [
        ("torch", "torch", "torch"),
        ("torch", "ray", "torch"),
        ("mlx", "mlx_lm", "mlx"),
        ("fake", "ray", "server"),
        ("auto", "ray", "torch"),
    ],
)
def test_a_missing_extra_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, backend: Any, missing: str, extra: str
) -> None:
    from sakuradite.client import embedded

    monkeypatch.setattr(embedded, "find_spec", lambda module: None if module == missing else object())
    with pytest.raises(MissingExtraError, match=rf"needs the extra \[{extra}\]: pip install 'sakuradite\[{extra}\]'"):
        Sakuradite("m", backend=backend).open()
