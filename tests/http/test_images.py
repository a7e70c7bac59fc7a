"""Images over HTTP: what is taken reaches the model as it came, what is not is refused before it in every dialect."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from tests.http.conftest import NOUL, native, openai
from tests.http.serving import EngineGateway, Served, serve
from tests.photographs import DAMAGED, REFUSED, TAKEN
from tests.test_images import encoded

GOOD = encoded("PNG")


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def send(client: httpx.Client, dialect: str, *images: bytes, **changes: Any) -> httpx.Response:
    """Images in one of the three dialects, all said to be PNG."""
    if dialect == "native":
        path, body = "/v1/decisions", native(images=[url(data) for data in images], **changes)
    elif dialect == "openai":
        parts = [{"type": "input_image", "image_url": url(data)} for data in images]
        path, body = "/v1/decisions", openai(input=[{"role": "user", "content": parts}])
    else:
        assets = {
            f"<{i}>": {"type": "image", "format": "png", "data_base64": base64.b64encode(data).decode()}
            for i, data in enumerate(images)
        }
        path, body = "/v1/systemone", native(assets=assets, state=" ".join(assets))
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize("dialect", ["native", "systemone", "openai"])
def test_what_is_taken_arrives_byte_for_byte(dialect: str, scripted: Callable[..., Served]) -> None:
    """Whatever type the caller says: the file itself tells."""
    served = scripted()
    for name, (data, _, _) in TAKEN.items():
        response = send(served.client, dialect, GOOD, data)
        assert response.status_code == 200, (name, response.text)
        assert served.gateway.requests[-1].images == (GOOD, data), name


@pytest.mark.parametrize(
    ("dialect", "status", "place"),
    [
        ("native", 422, ["body", "images", 1]),
        ("systemone", 422, ["body", "assets", "<1>"]),
        ("openai", 422, "input[0].content[1].image_url"),
    ],
)
def test_what_is_not_taken_is_named_before_the_model_hears_of_it(
    dialect: str, status: int, place: Any, scripted: Callable[..., Served]
) -> None:
    """Cases 36, 40 and others: from the header, in every dialect."""
    served = scripted()
    for name, (data, reason) in REFUSED.items():
        response = send(served.client, dialect, GOOD, data)
        assert response.status_code == status, (name, response.text)
        assert reason in response.text, (name, response.text)
        body = response.json()
        found = body["error"]["param"] if dialect == "openai" else body["detail"][0]["loc"][: len(place)]
        assert found == place, name
    assert served.gateway.requests == []


class Seeing(EngineGateway):
    """A tiny image model on PyTorch, with all that is between the request and its answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config = ModelConfig(model=self.config.model, backend="torch", device="cpu", dtype="float32", num_cpus=1)
        self.engine = Engine(self.config, folder)


@pytest.fixture(scope="module")
def seeing(tiny: Callable[..., Path]) -> Iterator[httpx.Client]:
    with serve(Seeing(tiny("idefics3"))) as served:
        yield served.client


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_answered(name: str, seeing: httpx.Client) -> None:
    """Case 39 and others, decoded and seen by a model."""
    response = send(seeing, "native", TAKEN[name][0])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_inside_is_told_before_any_answer(name: str, stream: bool, seeing: httpx.Client) -> None:
    """Case 36: with a stream too the status is 422, not an event after answers."""
    response = send(seeing, "native", GOOD, DAMAGED[name], stream=stream)
    assert response.status_code == 422, response.text
    assert response.json()["detail"][0]["loc"] == ["body", "images", 1]
    assert "images[1] cannot be decoded" in response.json()["error"]["message"]
    assert send(seeing, "native", GOOD).status_code == 200


def test_over_the_limit_says_both_numbers_with_the_images_expanded(tiny: Callable[..., Path]) -> None:
    gateway = Seeing(tiny("idefics3"))
    gateway.config = gateway.config.model_copy(update={"max_input_tokens": 200})
    gateway.engine = Engine(gateway.config, tiny("idefics3"))
    with serve(gateway) as served:
        assert send(served.client, "native").status_code == 200
        response = send(served.client, "native", *[encoded("PNG", (90, 60))] * 8, questions={"long": NOUL})
    assert response.status_code == 413, response.text
    error = response.json()["error"]
    assert error["code"] == "context_exceeded"
    assert "8 images included" in error["message"]
    assert "allows 200 per question" in error["message"]
    assert error["param"] == "questions.long"
