"""`/v1/models`: the models that are ready, in one body that every client can read."""

from __future__ import annotations

import time
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field

from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.gateway import ResidentModel
from sakuradite.http.site import Site


class ModelEntry(BaseModel):
    """A name that `model` can be, for System One clients."""

    name: str
    description: str
    release_date: str = Field(description="YYYY-MM-DD, of the checkpoint's files where its hub gave none.")


class OpenAIModel(BaseModel):
    """The same name, for OpenAI clients."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Seconds since the epoch.")
    owned_by: str


class ModelList(BaseModel):
    """Resident models and their aliases, twice: `models` for System One clients, `data` for OpenAI clients."""

    models: list[ModelEntry]
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


async def models(site: Site, exchange: Exchange) -> Reply:
    """GET /v1/models."""
    entries: list[dict[str, Any]] = []
    data: list[dict[str, Any]] = []
    for model in site.gateway.resident():
        date = time.strftime("%Y-%m-%d", time.gmtime(model.created))
        for name in (model.id, *model.aliases):
            text = _description(model) if name == model.id else f"Alias of {model.id}"
            entries.append({"name": name, "description": text, "release_date": date})
            data.append({"id": name, "object": "model", "created": model.created, "owned_by": "sakuradite"})
    return Reply(200, orjson.dumps({"models": entries, "object": "list", "data": data}))


def _description(model: ResidentModel) -> str:
    able = model.capabilities
    return (
        f"{able.architecture}, {able.dtype}, {' and '.join(able.modalities)}, {able.max_input_tokens} tokens a question"
    )
