"""The API reference: the OpenAPI document, the page, and every example in them sent to a server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from sakuradite.errors import APIError
from sakuradite.http import examples
from sakuradite.http.openapi import document, frames
from sakuradite.http.page import curl, page
from sakuradite.http.routes import ROUTES
from sakuradite.http.site import Example, Route
from tests.http.conftest import ADMIN_KEY, API_KEY
from tests.http.serving import FakeAdministration, ScriptedGateway, Served, serve

DOCUMENT = document(ROUTES, True)
EXAMPLES = [(route, example) for route in ROUTES for example in route.examples]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A model that sees, under the name that the examples use."""
    gateway = ScriptedGateway()
    gateway.models = [model_named(gateway, examples.MODEL)]
    with serve(gateway, FakeAdministration(), api_key=API_KEY, admin_key=ADMIN_KEY) as served:
        yield served


def model_named(gateway: ScriptedGateway, name: str) -> Any:
    (model,) = gateway.models
    return type(model)(name, model.created, model.capabilities, model.aliases)


def test_the_document_is_valid_openapi_3_1() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["servers"][0]["url"] == "."
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description") or "properties" not in schema, f"{name} has no description"


OPERATION_IDS = {
    "createDecision", "createSystemOneDecision", "listModels", "getHealth", "getHealthHead", "getReadiness",
    "getReadinessHead", "getMetrics", "getDocs", "getOpenAPI", "listStoredModels", "inspectModel", "pullModel",
    "loadModel", "unloadModel", "removeModel", "listOperations", "getOperation", "listAliases", "getAlias", "setAlias",
    "deleteAlias",
}  # fmt: skip


def test_operation_ids_are_stable() -> None:
    """Generated clients are named after these; a change here breaks them."""
    found = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(found) == len(set(found))
    assert set(found) == OPERATION_IDS


def test_every_route_of_the_contract_is_there() -> None:
    assert {(r.method, r.path) for r in ROUTES} == {
        ("POST", "/v1/decisions"), ("POST", "/v1/systemone"), ("GET", "/v1/models"), ("GET", "/healthz"),
        ("GET", "/readyz"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/metrics"),
        ("GET", "/admin/v1/models"), ("POST", "/admin/v1/models/inspect"), ("POST", "/admin/v1/models/pull"),
        ("POST", "/admin/v1/models/load"),
        ("POST", "/admin/v1/models/unload"), ("DELETE", "/admin/v1/models"), ("GET", "/admin/v1/operations"),
        ("GET", "/admin/v1/operations/{operation_id}"), ("GET", "/admin/v1/aliases"),
        ("GET", "/admin/v1/aliases/{alias}"), ("PUT", "/admin/v1/aliases/{alias}"),
        ("DELETE", "/admin/v1/aliases/{alias}"),
    }  # fmt: skip


def test_keys_are_asked_for_where_they_are() -> None:
    keyless = document(ROUTES, False)
    for route in ROUTES:
        with_key = DOCUMENT["paths"][route.path][route.method.lower()]["security"]
        without = keyless["paths"][route.path][route.method.lower()]["security"]
        assert with_key == {"open": [], "inference": [{"inferenceKey": []}], "admin": [{"adminKey": []}]}[route.access]
        assert without == ([{"adminKey": []}] if route.access == "admin" else [])


def body_schema(content: dict[str, Any]) -> Any:
    """A schema with the components it refers to."""
    return {**content["schema"], "components": DOCUMENT["components"]}


@pytest.mark.parametrize(("route", "example"), EXAMPLES, ids=lambda x: getattr(x, "operation_id", None) or x.name)
def test_every_example_works_and_follows_its_schema(served: Served, route: Route, example: Example) -> None:
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
    if example.request is not None:
        content = operation["requestBody"]["content"]["application/json"]
        assert content["examples"][example.name]["value"] == example.request
        jsonschema.validate(example.request, body_schema(content))
    response = send(served, curl(route, example, served.url))
    answer = route.answers[0]
    if "{operation_id}" in route.path:
        assert response.status_code == 404  # the id of an operation that this server never had
        return
    assert response.status_code == answer.status, response.text
    schema = body_schema(operation["responses"][str(answer.status)]["content"]["application/json"])
    if isinstance(example.response, list) and example.request:
        event_content = operation["responses"]["200"]["content"]["text/event-stream"]
        schema = {**event_content["x-event-schema"], "components": DOCUMENT["components"]}
        sent = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        assert [e["type"] for e in sent] == [e["type"] for e in example.response]
        for event in [*sent, *example.response]:
            jsonschema.validate(event, schema)
        assert event_content["examples"][example.name]["value"] == frames(example.response)
        return
    for value in (example.response, response.json()):
        jsonschema.validate(value, schema)
    assert shape(response.json()) == shape(example.response) or route.access == "admin"


def shape(value: Any) -> Any:
    """The keys of a value, without what differs between two models."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return None


def send(served: Served, command: str) -> httpx.Response:
    """Run a curl command line of ours with httpx."""
    words = shlex.split(
        command.replace("\\\n", " ").replace("$SAKURADITE_API_KEY", API_KEY).replace("$SAKURADITE_ADMIN_KEY", ADMIN_KEY)
    )
    assert words.pop(0) == "curl"
    method, headers, data, url = None, {}, None, ""
    while words:
        match words.pop(0):
            case "-X":
                method = words.pop(0)
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                data = words.pop(0).encode()
            case "-o":
                words.pop(0)
            case url:
                assert url.startswith("http")
    return served.client.request(method or ("POST" if data else "GET"), url, headers=headers, content=data)


def test_every_command_on_the_page_works(served: Served) -> None:
    reader = Reader()
    reader.feed(page(ROUTES, DOCUMENT))
    commands = [line for block in reader.code for line in re.split(r"\n(?=curl )", block) if line.startswith("curl ")]
    assert len(commands) > 20
    for command in commands:
        response = send(served, command.replace("http://127.0.0.1:7777", served.url))
        assert response.status_code in ((404,) if "/operations/" in command else (200, 202)), command


class Reader(HTMLParser):
    """Collects what the tests look at: ids, links, code, tags, and whether every tag is closed."""

    VOID = frozenset({"meta", "link", "wbr", "br", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.code: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self.attributes |= values.keys()
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "pre":
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.code[-1] += data


def test_the_page_is_whole_and_its_links_lead_somewhere(served: Served) -> None:
    response = served.client.get("/docs", headers={"authorization": f"Bearer {API_KEY}"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    reader = Reader()
    reader.feed(response.text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {link for link in reader.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    assert not reader.tags & {"script", "link", "img", "iframe", "form", "input", "button", "object", "video"}
    assert not {a for a in reader.attributes if a.startswith("on") or a in ("src", "srcset", "action", "style")}
    assert {"main", "nav", "header", "section", "article", "table", "thead", "th", "h1", "h2", "h3"} <= reader.tags
    for route in ROUTES:
        assert route.operation_id in reader.ids
    for name in DOCUMENT["components"]["schemas"]:
        assert f"schema-{name}" in reader.ids
    for kind in APIError.__subclasses__():
        assert f"error-{kind.code}" in reader.ids


def test_the_document_is_served_as_it_was_made(served: Served) -> None:
    response = served.client.get("/openapi.json", headers={"authorization": f"Bearer {API_KEY}"})
    assert response.headers["content-type"] == "application/json"
    assert response.json() == DOCUMENT
