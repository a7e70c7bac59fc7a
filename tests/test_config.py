"""Settings in their documented order: arguments, environment, config.toml, defaults."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from sakuradite.config import ModelConfig, ServerConfig, client_settings, server_settings
from sakuradite.errors import ConfigurationError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MODEL", "BASE_URL", "API_KEY", "ADMIN_KEY"):
        monkeypatch.delenv(f"SAKURADITE_{name}", raising=False)


def test_the_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text(
        'model = "file"\nbase_url = "http://file"\napi_key = "file"\ndtype = "float32"\n'
    )
    monkeypatch.setenv("SAKURADITE_BASE_URL", "http://env")
    monkeypatch.setenv("SAKURADITE_API_KEY", "env")
    monkeypatch.setenv("SAKURADITE_HOME", str(tmp_path))
    settings = client_settings(api_key="argument")
    assert (settings.api_key, settings.base_url, settings.model, settings.dtype, settings.backend) == (
        "argument", "http://env", "file", "float32", "auto",
    )  # fmt: skip
    assert settings.origin["api_key"] == "argument"
    assert settings.origin["base_url"] == "SAKURADITE_BASE_URL"
    assert settings.origin["model"] == str(tmp_path / "config.toml")
    assert settings.origin["backend"] == "default"
    assert settings.origin["home"] == "SAKURADITE_HOME"
    assert "argument" not in repr(settings).replace("'argument'", "")  # no key in a repr


def test_a_key_that_is_not_known_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('modell = "x"\n')
    with pytest.raises(ConfigurationError, match="unknown key 'modell'"):
        client_settings(tmp_path)


def test_a_broken_file_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("model = \n")
    with pytest.raises(ConfigurationError, match=r"config\.toml.*line 1"):
        client_settings(tmp_path)


def test_server_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("[server]\nport = 8000\nmax_request_bytes = 1000\n")
    monkeypatch.setenv("SAKURADITE_API_KEY", "secret")
    config = server_settings(tmp_path, port=9000, host=None)
    assert (config.port, config.max_request_bytes, config.host, config.api_key) == (9000, 1000, "127.0.0.1", "secret")
    assert "secret" not in repr(config)
    (tmp_path / "config.toml").write_text("[server]\nprot = 8000\n")
    with pytest.raises(ConfigurationError, match=r"\[server\] prot"):
        server_settings(tmp_path)


def test_the_documented_defaults_of_a_model() -> None:
    config = ModelConfig(model="m")
    assert (config.max_input_tokens, config.max_questions, config.max_pending_requests) == (8192, 400, 128)
    assert (config.max_pending_bytes, config.max_batch_size, config.max_batch_tokens) == (128 << 20, 16, 8192)
    assert (config.timeout, config.replicas, config.backend) == (120.0, 1, "auto")


@pytest.mark.parametrize(
    "bad",
    [
        {"max_batch": 3},
        {"replicas": {"min": 3, "max": 2}},
        {"timeout": 0},
        {"dtype": "int8"},
        {"num_cpus": float("inf")},
        {"num_gpus": float("nan")},
    ],
)
def test_a_misspelt_or_impossible_model_setting_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelConfig.model_validate({"model": "m"} | bad)


@pytest.mark.parametrize("settings", [ModelConfig, ServerConfig])
def test_every_field_is_in_the_documentation_with_its_default(settings: type[BaseModel]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    (section,) = (part for part in page.split("\n## ") if f"`{settings.__name__}`" in part.splitlines()[0])
    told = re.findall(r"^\| `(\w+)` \|(.*?) ?\|", section, re.MULTILINE)

    def written(default: object) -> str:
        match default:
            case None:
                return "none"
            case bool():
                return f"`{str(default).lower()}`"
            case int() | float():
                return str(int(default))
            case str():
                return f'`"{default}"`'
            case _:
                return f"`{default}`"

    fields = settings.model_fields
    assert [(name, default.strip()) for name, default in told] == [
        (name, "" if field.is_required() else written(field.get_default(call_default_factory=True)))
        for name, field in fields.items()
    ]
