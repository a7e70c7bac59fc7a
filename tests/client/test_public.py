"""The names the package offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sakuradite

ROOT = Path(__file__).parents[2]
RUNTIMES = {"ray", "torch", "transformers", "mlx", "numpy", "PIL"}
HEAVY = RUNTIMES | {"httpx", "pydantic", "typer", "prompt_toolkit", "rich"}
HTTPX = {"httpx", "pydantic", "rich"}  # httpx's own command line imports rich where click is installed, as with Ray


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after some code."""
    report = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_the_public_names() -> None:
    assert sakuradite.__all__ == [
        "APIError",
        "AnswerEvent",
        "AsyncClient",
        "AsyncDecisionStream",
        "Choice",
        "ChoiceAnswer",
        "ClosedError",
        "CompleteEvent",
        "DecisionResult",
        "DecisionStream",
        "Description",
        "MissingExtraError",
        "ModelConfig",
        "Noul",
        "NoulAnswer",
        "NoulCriteria",
        "Sakuradite",
        "SakuraditeError",
        "Score",
        "ScoreAnswer",
        "SyncClient",
        "TransportError",
        "Usage",
        "ValidationError",
        "__version__",
    ]


@pytest.mark.parametrize("name", sakuradite.__all__)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(sakuradite, name)
    assert name in dir(sakuradite)
    assert isinstance(value, str) or value.__doc__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sakura'"):
        sakuradite.Sakura  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    assert loaded("import sakuradite") & HEAVY == set()


def test_importing_the_client_imports_no_runtime() -> None:
    assert loaded("from sakuradite import Choice, Noul, Sakuradite, Score") & (HEAVY - HTTPX) == set()


def test_deciding_over_http_imports_no_runtime() -> None:
    code = """
import httpx, sakuradite
answer = {"model": "m", "answers": {"q": {"type": "noul", "noul": 0.5}}, "usage": {"input_tokens": 1}}
own = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answer)))
with sakuradite.Sakuradite("m", base_url="http://x", http_client=own) as client:
    client.decide("x", {"q": {"type": "noul"}})
"""
    assert loaded(code) & (HEAVY - HTTPX) == set()


def test_types_are_shipped() -> None:
    assert (Path(sakuradite.__file__).parent / "py.typed").exists()
