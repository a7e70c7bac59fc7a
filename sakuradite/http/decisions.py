"""The two decision routes: read, parse in the right dialect, ask the model, answer."""

from __future__ import annotations

from typing import Any

import orjson

from sakuradite.errors import UnsupportedMediaTypeError, UnsupportedModelError
from sakuradite.http.admission import Place
from sakuradite.http.body import expand, read_body
from sakuradite.http.crowds import refuse_crowds
from sakuradite.http.dialects import Ask, native, openai, placed, systemone, too_many_questions
from sakuradite.http.exchange import Exchange, Reply
from sakuradite.http.reading import read_json
from sakuradite.http.site import Site
from sakuradite.http.streaming import WhileConnected, collect, stream
from sakuradite.records import RequestRecord

JSON_TYPES = ("application/json", "application/json; charset=utf-8")


async def decisions(site: Site, exchange: Exchange) -> Reply | None:
    """POST /v1/decisions, in the native or the OpenAI dialect."""
    require_json(exchange)
    with site.admission.place() as place:
        data = read_json(await read(site, exchange, place))
        refuse_crowds(data)
        if openai.is_openai(data):
            exchange.account.dialect = "openai"
            ask: Ask = openai.parse(data)
        else:
            ask = native.parse(data)
        return await _decide(site, exchange, ask)


async def system_one(site: Site, exchange: Exchange) -> Reply | None:
    """POST /v1/systemone, JSON or a form with images."""
    if not exchange.content_type.lower().startswith("multipart/form-data"):
        require_json(exchange)
    with site.admission.place() as place:
        ask = systemone.parse(await read(site, exchange, place), exchange.content_type)
        return await _decide(site, exchange, ask)


def require_json(exchange: Exchange) -> None:
    """Raise UnsupportedMediaTypeError unless the body is declared as JSON in UTF-8."""
    sent = exchange.content_type.lower()
    if sent in JSON_TYPES:
        return
    kind, *parameters = (part.strip() for part in sent.split(";"))
    charset = [p.partition("=")[2].strip(' "') for p in parameters if p.startswith("charset=")]
    if kind != "application/json" or charset not in ([], ["utf-8"], ["utf8"]):
        raise UnsupportedMediaTypeError("Content-Type must be application/json in UTF-8", param="Content-Type")


async def read(site: Site, exchange: Exchange, place: Place) -> bytes:
    """The body, bounded and decoded."""
    limit = site.config.max_request_bytes
    sent = await read_body(exchange.receive, exchange.headers, limit, place.hold)
    body = expand(sent, exchange.headers, limit)
    if len(body) > len(sent):
        place.hold(len(body) - len(sent))
    return body


async def _decide(site: Site, exchange: Exchange, ask: Ask) -> Reply | None:
    model = site.gateway.resolve(ask.model)
    able = model.capabilities
    account = exchange.account
    account.model, account.stream = model.id, ask.stream
    account.questions, account.images = len(ask.questions), len(ask.images)
    if len(ask.questions) > able.max_questions:
        raise too_many_questions(len(ask.questions), able.max_questions)
    if ask.images and "image" not in able.modalities:
        raise placed(UnsupportedModelError(f"images not supported by {model.id}"), ("body", ask.images_field))
    record = RequestRecord(exchange.key, ask.state, ask.questions, ask.images, trace=account.trace)
    async with WhileConnected(exchange.receive):
        groups = site.gateway.decide(model, record)
        if ask.stream:
            await stream(exchange, ask, model.id, groups, site.config.stream_write_timeout)
            return None
        rows = await collect(ask, groups)
    account.input_tokens = sum(row.input_tokens for row in rows)
    result: dict[str, Any] = ask.result(model.id, rows)
    return Reply(200, orjson.dumps(result))
