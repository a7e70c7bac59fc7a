"""The API reference as one HTML page: no script, no network, readable in the dark, on a phone and from a disk."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from sakuradite.http import guide
from sakuradite.http.openapi import ERRORS, codes_by_status, frames, package_version
from sakuradite.http.site import Example, Route
from sakuradite.http.style import STYLE

BASE_URL = "http://127.0.0.1:7777"
INFERENCE = "$SAKURADITE_API_KEY"
ADMIN = "$SAKURADITE_ADMIN_KEY"


def page(routes: Sequence[Route], document: dict[str, Any]) -> str:
    """The whole page. `document` is the OpenAPI document of the same routes, whose schemas are shown."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    tags = list(dict.fromkeys(route.tag for route in routes))
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n<title>Sakuradite API reference</title>\n',
            f"<style>{STYLE}</style>\n</head>\n<body>\n",
            '<a class="skip" href="#content">Skip to the content</a>\n',
            _header(),
            '<div class="columns">\n',
            _navigation(routes, tags, schemas),
            '<main id="content">\n',
            *(_section(anchor, title, _text(body)) for anchor, title, body in guide.CHAPTERS),
            _section("errors", "Errors", _text(guide.ERRORS) + _errors()),
            *(_group(tag, [r for r in routes if r.tag == tag], document) for tag in tags),
            _section("schemas", "Schemas", "".join(_schema(name, body) for name, body in sorted(schemas.items()))),
            "</main>\n</div>\n</body>\n</html>\n",
        )
    )


def _header() -> str:
    return (
        "<header>\n<h1>Sakuradite <span>API reference</span></h1>\n"
        "<p>Typed decisions with probabilities from open-weight language models: typed questions about a state go in, "
        "typed answers come out. Nothing is sampled and no text is generated.</p>\n"
        f'<p class="meta">Version {_e(package_version())}. The same as data: <a href="openapi.json">openapi.json</a>'
        "</p>\n</header>\n"
    )


def _navigation(routes: Sequence[Route], tags: Sequence[str], schemas: dict[str, Any]) -> str:
    parts = ['<nav aria-label="Contents">\n<h2>Contents</h2>\n<ul>\n']
    chapters = [(anchor, title) for anchor, title, _ in guide.CHAPTERS]
    parts += [f'<li><a href="#{anchor}">{_e(title)}</a></li>\n' for anchor, title in (*chapters, ("errors", "Errors"))]
    for tag in tags:
        parts.append(f'<li><a href="#{_anchor(tag)}">{_e(tag)}</a>\n<ul>\n')
        for route in routes:
            if route.tag == tag:
                parts.append(f'<li><a href="#{route.operation_id}">{_method(route)} {_path(route.path)}</a></li>\n')
        parts.append("</ul></li>\n")
    parts.append('<li><a href="#schemas">Schemas</a></li>\n</ul>\n</nav>\n')
    return "".join(parts)


def _group(tag: str, routes: Iterable[Route], document: dict[str, Any]) -> str:
    return _section(_anchor(tag), tag, "".join(_endpoint(route, document) for route in routes))


def _endpoint(route: Route, document: dict[str, Any]) -> str:
    operation = document["paths"][route.path][route.method.lower()]
    key = {"open": "No key.", "inference": "Inference key, where one is set.", "admin": "Admin key."}[route.access]
    parts = [
        f'<article id="{route.operation_id}">\n<h3><a href="#{route.operation_id}">{_method(route)} '
        f"<code>{_path(route.path)}</code></a></h3>\n",
        f'<p class="summary">{_e(route.summary)}</p>\n',
        _text(route.description),
        f'<p class="meta">{_e(key)}{" HEAD works too." if route.head else ""}</p>\n',
    ]
    if route.parameters:
        rows = [(f"<code>{_e(p.name)}</code>", f"in the {p.place}", _e(p.description)) for p in route.parameters]
        parts.append("<h4>Parameters</h4>\n" + _table(("Name", "Where", "Meaning"), rows))
    if route.requests:
        body = operation["requestBody"]["content"]
        media_rows = [(f"<code>{_e(media)}</code>", _kind(body[media]["schema"])) for media, _ in route.requests]
        parts.append("<h4>Request body</h4>\n" + _table(("Media type", "Schema"), media_rows))
    parts.append("<h4>Responses</h4>\n" + _table(("Status", "Meaning", "Body"), _responses(route, operation)))
    if route.examples:
        parts.append("<h4>Examples</h4>\n" + "".join(_example(route, e, i == 0) for i, e in enumerate(route.examples)))
    return "".join((*parts, "</article>\n"))


def _responses(route: Route, operation: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for answer in route.answers:
        body = operation["responses"][str(answer.status)]["content"][answer.media_type]
        kind = _kind(body.get("x-event-schema", body["schema"]))
        rows.append((f"<strong>{answer.status}</strong>", _inline(answer.description), kind))
    for status, codes in codes_by_status(route).items():
        names = ", ".join(f'<a href="#error-{code}"><code>{code}</code></a>' for code in codes)
        content = operation["responses"][str(status)]["content"]
        kind = _kind(content["application/json"]["schema"]) if "application/json" in content else ""
        rows.append((f"<strong>{status}</strong>", names, kind))
    return rows


def _example(route: Route, example: Example, opened: bool) -> str:
    parts = [f"<details{' open' if opened else ''}>\n<summary>{_inline(example.summary)}</summary>\n"]
    parts.append(_code(curl(route, example)))
    response = frames(example.response) if isinstance(example.response, list) and example.request else None
    parts.append(f"<p>answers with {route.answers[0].status} and</p>\n")
    parts.append(_code(response if response is not None else _json(example.response)))
    return "".join((*parts, "</details>\n"))


def curl(route: Route, example: Example, base_url: str = BASE_URL) -> str:
    """The command line of an example."""
    path = re.sub(r"\{\w+\}", lambda _: _path_value(example), route.path)
    lines = [f"curl {base_url}{path}"]
    if route.method not in ("GET", "POST"):
        lines[0] = f"curl -X {route.method} {base_url}{path}"
    if route.access != "open":
        lines.append(f'-H "Authorization: Bearer {ADMIN if route.access == "admin" else INFERENCE}"')
    if example.request is not None:
        lines.append("-H 'Content-Type: application/json'")
        lines.append("-d '" + _json(example.request).replace("'", "'\\''") + "'")
    return " \\\n  ".join(lines)


def _path_value(example: Example) -> str:
    response = example.response if isinstance(example.response, dict) else {}
    return str(response.get("id") or response.get("alias") or "NAME")


def _errors() -> str:
    rows = []
    for code, kind in sorted(ERRORS.items(), key=lambda item: (item[1].status, item[0])):
        again = "may succeed later" if kind.retryable else ""
        meaning = (kind.__doc__ or "").strip()
        rows.append((f"<strong>{kind.status}</strong>", f'<code id="error-{code}">{code}</code>', _e(meaning), again))
    return _table(("Status", "Code", "Meaning", "The same request"), rows)


def _schema(name: str, body: dict[str, Any]) -> str:
    parts = [f'<article id="schema-{name}">\n<h3><a href="#schema-{name}">{_e(name)}</a></h3>\n']
    if "description" in body:
        parts.append(_text(body["description"]))
    if "properties" in body:
        required = body.get("required", ())
        rows = []
        for field, schema in body["properties"].items():
            mark = "" if field in required else ' <span class="optional">optional</span>'
            rows.append((f"<code>{_e(field)}</code>{mark}", _kind(schema), _meaning(schema)))
        parts.append(_table(("Field", "Type", "Meaning"), rows))
    else:
        parts.append(f"<p>{_kind(body)}</p>\n")
    if body.get("additionalProperties") is False:
        parts.append('<p class="meta">Other fields are refused.</p>\n')
    return "".join((*parts, "</article>\n"))


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, in words, with links to named schemas."""
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return f'<a href="#schema-{name}">{_e(name)}</a>'
        case {"const": value}:
            return f"<code>{_e(_literal(value))}</code>"
        case {"enum": values}:
            return " or ".join(f"<code>{_e(_literal(value))}</code>" for value in values)
        case {"anyOf": options} | {"oneOf": options}:
            return " or ".join(_kind(option) for option in options)
        case {"type": "array", "items": items} if items:
            return f"list of {_kind(items)}"
        case {"type": "array"}:
            return "list"
        case {"type": "object", "additionalProperties": dict() as items} if items and "properties" not in schema:
            return f"object of {_kind(items)}"
        case {"type": "object", "properties": {"request": body}}:
            return f"a form: <code>request</code> is {_kind(body)}, then the files"
        case {"type": kind}:
            return {"string": "text", "boolean": "true or false", "number": "number"}.get(kind, str(kind))
    return "anything"


LIMITS = {
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "minLength": "not empty",
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
}


def _meaning(schema: dict[str, Any]) -> str:
    """A field's description, limits and default."""
    limits = {key: value for option in (schema, *schema.get("anyOf", ())) for key, value in option.items()}
    said = [_inline(schema["description"])] if "description" in schema else []
    bounds = ", ".join(text.format(limits[key]) for key, text in LIMITS.items() if key in limits)
    if bounds:
        said.append(bounds[0].upper() + bounds[1:] + ".")
    if schema.get("default") not in (None, [], {}):
        said.append(f"Default: <code>{_e(_literal(schema['default']))}</code>.")
    return " ".join(said)


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}">\n<h2><a href="#{anchor}">{_e(title)}</a></h2>\n{body}</section>\n'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{_e(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_e(", ".join(head))}"><table>\n<thead><tr>{cells}'
        f"</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _method(route: Route) -> str:
    return f'<span class="method {route.method.lower()}">{route.method}</span>'


def _text(text: str) -> str:
    """Paragraphs, indented blocks as code, `- ` lines as a list, and tables with `|`."""
    parts = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            parts.append(_code("\n".join(line[4:] for line in lines)))
        elif all(line.startswith("- ") for line in lines):
            parts.append("<ul>\n" + "".join(f"<li>{_inline(line[2:])}</li>\n" for line in lines) + "</ul>\n")
        elif all(line.startswith("|") for line in lines):
            head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
            parts.append(_table(head, [[_inline(cell) for cell in row] for row in rows]))
        else:
            parts.append(f"<p>{_inline(' '.join(lines))}</p>\n")
    return "".join(parts)


def _inline(text: str) -> str:
    """Escaped text; `code` and [words](#anchor) are marked up."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", _e(text))
    return re.sub(r"\[([^\]]+)\]\((#[\w-]+|[\w.]+)\)", r'<a href="\2">\1</a>', text)


def _code(text: str) -> str:
    return f'<pre tabindex="0"><code>{_e(text.rstrip())}</code></pre>\n'


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _literal(value: Any) -> str:
    return orjson.dumps(value).decode()


def _path(path: str) -> str:
    """A path that may break after its slashes."""
    return _e(path).replace("/", "/<wbr>").replace("/<wbr>", "/", 1)


def _anchor(tag: str) -> str:
    return f"group-{tag.lower()}"


def _e(text: str) -> str:
    return html.escape(text)
