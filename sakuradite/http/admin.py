"""`/admin/v1`: what is stored and resident, operations, aliases. Everything is done by the Administration behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic import ValidationError as PydanticValidationError

from sakuradite.config import ModelConfig
from sakuradite.errors import NotFoundError
from sakuradite.http.body import expand, read_body
from sakuradite.http.decisions import require_json
from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.problems import explain, invalid
from sakuradite.http.reading import read_json
from sakuradite.http.site import Site
from sakuradite.operations import Alias, ModelStatus, Operation

MAX_BODY_BYTES = 1 << 20  # a configuration or a name

_STATUSES = TypeAdapter(Sequence[ModelStatus])
_OPERATIONS = TypeAdapter(Sequence[Operation])
_ALIASES = TypeAdapter(Sequence[Alias])


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CheckpointRequest(_Body):
    """A checkpoint: a hub id, or a path on the machine that loads it."""

    model: str = Field(min_length=1)
    revision: str | None = Field(default=None, description="A branch, tag or commit of the hub; the default is main.")
    offline: bool = Field(default=False, description="Use local files only.")


class ModelName(_Body):
    """The id of a model, or an alias."""

    model: str = Field(min_length=1)


async def models(site: Site, exchange: Exchange) -> Reply:
    """Every stored and resident model."""
    return Reply(200, _STATUSES.dump_json(await site.administration.models()))


async def inspect(site: Site, exchange: Exchange) -> Reply:
    """Metadata of a checkpoint, without its weights."""
    body = await _body(exchange, CheckpointRequest)
    return _reply(await site.administration.inspect(body.model, body.revision, body.offline))


async def pull(site: Site, exchange: Exchange) -> Reply:
    """Begin to download."""
    body = await _body(exchange, CheckpointRequest)
    return _reply(await site.administration.pull(body.model, body.revision, body.offline), 202)


async def load(site: Site, exchange: Exchange) -> Reply:
    """Begin to load."""
    return _reply(await site.administration.load(await _body(exchange, ModelConfig)), 202)


async def unload(site: Site, exchange: Exchange) -> Reply:
    """Drain and free a model; answers when that is done."""
    return _reply(await site.administration.unload((await _body(exchange, ModelName)).model))


async def remove(site: Site, exchange: Exchange) -> Reply:
    """Delete a stored checkpoint."""
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    names = query.get("model", [])
    if len(names) != 1 or not names[0]:
        raise invalid(("query", "model"), "Exactly one is required", "missing")
    return _reply(await site.administration.remove(names[0]))


async def operations(site: Site, exchange: Exchange) -> Reply:
    """The operations that are remembered."""
    return Reply(200, _OPERATIONS.dump_json(await site.administration.operations()))


async def operation(site: Site, exchange: Exchange) -> Reply:
    """One operation; 200 whatever became of it."""
    return _reply(await site.administration.operation(exchange.parameters["operation_id"]))


async def aliases(site: Site, exchange: Exchange) -> Reply:
    """The alias table."""
    return Reply(200, _ALIASES.dump_json(await site.administration.aliases()))


async def alias(site: Site, exchange: Exchange) -> Reply:
    """One alias."""
    name = exchange.parameters["alias"]
    for entry in await site.administration.aliases():
        if entry.alias == name:
            return _reply(entry)
    raise NotFoundError(f"no alias {name!r}", param="alias")


async def set_alias(site: Site, exchange: Exchange) -> Reply:
    """Point an alias at a model."""
    body = await _body(exchange, ModelName)
    return _reply(await site.administration.set_alias(exchange.parameters["alias"], body.model))


async def delete_alias(site: Site, exchange: Exchange) -> Reply:
    """Remove an alias."""
    return _reply(await site.administration.delete_alias(exchange.parameters["alias"]))


async def _body[T: BaseModel](exchange: Exchange, kind: type[T]) -> T:
    """The body as a pydantic model. Raises as the decision routes do."""
    require_json(exchange)
    sent = await read_body(exchange.receive, exchange.headers, MAX_BODY_BYTES)
    data: Any = read_json(expand(sent, exchange.headers, MAX_BODY_BYTES))
    try:
        return kind.model_validate(data, strict=True)
    except PydanticValidationError as error:
        raise explain(error, data) from None


def _reply(body: BaseModel, status: int = 200) -> Reply:
    return Reply(status, body.model_dump_json().encode())
