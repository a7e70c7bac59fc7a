"""The OpenAPI 3.1 document, made from the route declarations and their pydantic schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue

from sakuradite.errors import APIError
from sakuradite.http import refusals
from sakuradite.http.docstrings import field_docstrings
from sakuradite.http.schemas import (
    ErrorResponse,
    SystemOneErrorResponse,
    SystemOneValidationErrorResponse,
    ValidationErrorResponse,
)
from sakuradite.http.site import Answer, Route

DESCRIPTION = (
    "Typed decisions with probabilities from open-weight language models. Questions about a state go in; out come the "
    "probability that a statement is true (noul), the option that fits (choice), the place on an ordered list (score). "
    "Nothing is sampled and no text is generated. Probabilities are normalised over the candidates supplied; "
    "they are not calibrated guarantees of correctness."
)
ERRORS = {kind.code: kind for kind in APIError.__subclasses__()}
REF = "#/components/schemas/{model}"


class _Schema(GenerateJsonSchema):
    """Pydantic's schema with the fields' docstrings, and without a title for each field: the name says it."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().model_schema(schema)
        if "description" in found:
            found["description"] = found["description"].partition("\n\n>>> ")[0]
        told = field_docstrings(schema["cls"])
        for name, field in found.get("properties", {}).items():
            if name in told:
                field.setdefault("description", told[name])
        return found


def document(routes: Sequence[Route], keyed: bool) -> dict[str, Any]:
    """The document of a server; with `keyed` the inference routes ask for the inference key."""
    schemas, components = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schemas, keyed)
        at = paths.setdefault(route.path, {})
        at[route.method.lower()] = operation
        if route.head:
            at["head"] = _head(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sakuradite",
            "version": package_version(),
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": ".", "description": "The place this document came from, below any prefix of a proxy."}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {
                "RequestId": {
                    "description": "The id of this request, for logs. An id of the caller's own is kept.",
                    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
                },
                "RetryAfter": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
            },
            "securitySchemes": {
                "inferenceKey": {"type": "http", "scheme": "bearer", "description": "SAKURADITE_API_KEY"},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "SAKURADITE_ADMIN_KEY, or admin.key"},
            },
        },
    }


def package_version() -> str:
    """The version of the installed package; 0 when it runs from a folder."""
    try:
        return version("sakuradite")
    except PackageNotFoundError:
        return "0"


def codes_by_status(route: Route) -> dict[int, list[str]]:
    """The error codes an endpoint answers with, by status, those of access and of a defect included."""
    codes = [*route.errors]
    if route.access != "open":
        codes += ["unauthorized", "forbidden"]
    codes.append("internal_error")
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        status = ERRORS[code].status
        if code == "model_not_found" and route.refuse is refusals.system_one:
            status = 400
        by_status.setdefault(status, []).append(code)
    return dict(sorted(by_status.items()))


def frames(events: Iterable[dict[str, Any]]) -> str:
    """Events as they are on the wire."""
    return "".join(f"event: {event['type']}\ndata: {orjson.dumps(event).decode()}\n\n" for event in events)


type _Key = tuple[str, str]


def _schemas(routes: Sequence[Route]) -> tuple[dict[tuple[_Key, JsonSchemaMode], JsonSchemaValue], dict[str, Any]]:
    """The schema of every body by its key, and the components they refer to."""
    wanted: list[tuple[_Key, JsonSchemaMode, TypeAdapter[Any]]] = []
    for route in routes:
        wanted += [
            ((route.operation_id, media_type), "validation", TypeAdapter(schema))
            for media_type, schema in route.requests
        ]
        wanted += [(_answer_key(route, a), "serialization", TypeAdapter(a.schema)) for a in route.answers]
    kinds = (ErrorResponse, ValidationErrorResponse, SystemOneErrorResponse, SystemOneValidationErrorResponse)
    wanted += [(("error", kind.__name__), "serialization", TypeAdapter(kind)) for kind in kinds]
    schemas, definitions = TypeAdapter.json_schemas(wanted, ref_template=REF, schema_generator=_Schema)
    components: dict[str, Any] = definitions["$defs"]
    _require_discriminators([*schemas.values(), *components.values()], components)
    return dict(schemas), components


def _require_discriminators(schemas: Iterable[Any], components: dict[str, Any]) -> None:
    """Mark the field that tells a union's members apart as required: its default only helps Python callers."""
    for schema in schemas:
        if isinstance(schema, list):
            _require_discriminators(schema, components)
        elif isinstance(schema, dict):
            if "discriminator" in schema:
                for member in schema["oneOf"]:
                    body, field = components[_name(member)], schema["discriminator"]["propertyName"]
                    body["properties"][field].pop("default", None)
                    body["required"] = sorted({*body.get("required", []), field}, key=list(body["properties"]).index)
            _require_discriminators(schema.values(), components)


def _name(reference: dict[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _answer_key(route: Route, answer: Answer) -> _Key:
    return (f"{route.operation_id} {answer.status}", answer.media_type)


def _operation(
    route: Route, schemas: dict[tuple[_Key, JsonSchemaMode], JsonSchemaValue], keyed: bool
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "tags": [route.tag],
        "summary": route.summary,
        "description": route.description,
        "responses": {},
    }
    match route.access:
        case "admin":
            operation["security"] = [{"adminKey": []}]
        case "inference" if keyed:
            operation["security"] = [{"inferenceKey": []}]
        case _:
            operation["security"] = []
    if route.parameters:
        operation["parameters"] = [
            {
                "name": p.name,
                "in": p.place,
                "required": p.required,
                "description": p.description,
                "schema": {"type": "string", "minLength": 1},
            }
            for p in route.parameters
        ]
    if route.requests:
        operation["requestBody"] = {
            "required": True,
            "content": {
                media: _request(route, media, schemas[((route.operation_id, media), "validation")])
                for media, _ in route.requests
            },
        }
    for answer in route.answers:
        response = operation["responses"].setdefault(
            str(answer.status), {"description": answer.description, "headers": _id_header(), "content": {}}
        )
        if answer.description not in response["description"]:
            response["description"] += f" {answer.description}"
        response["content"][answer.media_type] = _response(
            route, answer, schemas[(_answer_key(route, answer), "serialization")]
        )
    for status, codes in codes_by_status(route).items():
        if str(status) not in operation["responses"]:
            operation["responses"][str(status)] = _error(route, status, codes)
    return operation


def _request(route: Route, media: str, schema: JsonSchemaValue) -> dict[str, Any]:
    if media == "multipart/form-data":
        form = {
            "type": "object",
            "required": ["request"],
            "properties": {"request": schema},
            "additionalProperties": {"type": "string", "contentMediaType": "application/octet-stream"},
        }
        return {"schema": form, "encoding": {"request": {"contentType": "application/json"}}}
    found: dict[str, Any] = {"schema": schema}
    examples = {e.name: {"summary": e.summary, "value": e.request} for e in route.examples if e.request is not None}
    return found | ({"examples": examples} if examples else {})


def _response(route: Route, answer: Answer, schema: JsonSchemaValue) -> dict[str, Any]:
    if answer.media_type == "text/html":
        schema = {"type": "string"}
    if answer.media_type == "text/event-stream":
        examples = {e.name: {"value": frames(e.response)} for e in route.examples if isinstance(e.response, list)}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        event = {
            "type": "object",
            "description": "One event. Its name is the `type` of the JSON in its data.",
            "properties": {"event": {"enum": ["answer", "complete", "error"]}, "data": data},
            "required": ["event", "data"],
        }
        return {"schema": event, "x-event-schema": schema, "examples": examples}
    streams = any(a.media_type == "text/event-stream" for a in route.answers)
    if answer.status >= 300:
        return {"schema": schema}
    examples = {
        e.name: {"summary": e.summary, "value": e.response}
        for e in route.examples
        if not (streams and isinstance(e.response, list))
    }
    return {"schema": schema} | ({"examples": examples} if examples else {})


def _error(route: Route, status: int, codes: list[str]) -> dict[str, Any]:
    family = "SystemOne" if route.refuse is refusals.system_one else ""
    name = f"{family}{'Validation' if status == 422 else ''}ErrorResponse"
    headers: dict[str, Any] = _id_header()
    if status == 429 or (status == 503 and any(ERRORS[code].retryable for code in codes)):
        headers["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
    if status == 401:
        headers["WWW-Authenticate"] = {"schema": {"type": "string", "const": "Bearer"}}
    text = " ".join(f"`{code}`: {(ERRORS[code].__doc__ or '').strip()}" for code in codes)
    schema = {"$ref": REF.format(model=name)}
    return {"description": text, "headers": headers, "content": {"application/json": {"schema": schema}}}


def _id_header() -> dict[str, Any]:
    return {"x-request-id": {"$ref": "#/components/headers/RequestId"}}


def _head(operation: dict[str, Any]) -> dict[str, Any]:
    """The same operation without bodies, for HEAD."""
    responses = {
        status: {key: value for key, value in response.items() if key != "content"}
        for status, response in operation["responses"].items()
    }
    return operation | {"operationId": f"{operation['operationId']}Head", "responses": responses}
