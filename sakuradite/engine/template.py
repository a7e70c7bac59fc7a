"""The chat template of a checkpoint: what it writes before and after one user turn.

Rendered the way Transformers renders it (the same sandbox, filters and globals), once per model. The caller's text is
never rendered: a mark stands in for it, so no template can read, change or refuse it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from sakuradite.errors import UnsupportedModelError

MARK = "SAKURADITEUSERTURN"  # stands in for the user's message; letters only, so that no template trims or escapes it
REPLY = "SAKURADITEREPLYTURN"

THINKING_OFF: Mapping[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "think": False,
    "enable_reasoning": False,
    "thinking_budget": 0,
}
"""Switches by which templates turn thinking off; each is passed only to a template that reads it."""

THOUGHT = re.compile(r"(?:<(/?)(think|thinking|thought|reasoning|seed:think)>)|(?:\[(/?)(THINK)\])")


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around a user turn: `opening` before it, `closing` after it up to where the reply begins."""

    opening: str
    closing: str


PLAIN = Frame("", "\n\n")
"""For a base model, which has no template: the prompt is plain text."""


def read_template(folder: Path) -> str | None:
    """The default chat template of a checkpoint folder, or None. `chat_template.jinja` wins over the JSON files."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several named ones
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        if isinstance(found, str) and found.strip():
            return found
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when there is no such file."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def frame_of(source: str, special_tokens: Mapping[str, str]) -> Frame:
    """The frame that a template gives one user turn, thinking turned off; no system turn is used.

    Raises UnsupportedModelError when the template cannot show a single user turn.
    """
    render = _renderer(source, special_tokens)
    reason = "the user's text does not come out exactly once"
    for content in (MARK, [{"type": "text", "text": MARK}]):
        try:
            text = render(content, prompt=True)
            if text.count(MARK) != 1:
                continue
        except _failures() as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        opening, closing = text.split(MARK)
        # A template without a generation prompt: take the text between a user turn and its reply, where it has one.
        with contextlib.suppress(*_failures()):
            if text == render(content, prompt=False):
                closing = _between(render(content, REPLY, prompt=False)) or closing
        return Frame(opening, _without_thinking(closing))
    raise UnsupportedModelError(f"the chat template cannot show a single user turn: {reason}")


@lru_cache(maxsize=64)
def turn_of(
    source: str | None, special_tokens: tuple[tuple[str, str], ...], parts: tuple[bool, ...], placeholder: str
) -> tuple[str, ...]:
    """What stands before, between and after the texts of a user turn with images in it.

    `parts` is the turn in order: True a text, False an image, which the template shows as `placeholder` (and whatever
    it puts around it). Texts: one more than the turn has. Where a template takes text alone, and for a base model
    without one, the placeholders are written into the text. Raises UnsupportedModelError where neither works.
    """
    marks = [f"{MARK}{''.join(ascii_uppercase[int(d)] for d in str(i))}X" for i in range(sum(parts))]
    given = iter(marks)
    content = [{"type": "text", "text": next(given)} if text else {"type": "image"} for text in parts]
    written = "".join(part.get("text", placeholder) for part in content)
    if source is None:
        return tuple(_split(written, marks) or ())
    render = _renderer(source, dict(special_tokens))
    reason = "the images or texts do not come out once each, in order"
    for turn in (content, written):
        try:
            text = render(turn, prompt=True)
        except _failures() as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        found = _split(text, marks)
        if found is not None and text.count(placeholder) == parts.count(False):
            return tuple(found)
    raise UnsupportedModelError(f"the chat template cannot show a turn with images: {reason}")


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text between the marks, or None where they do not come once each and in order."""
    found = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, text = text.split(mark)
        found.append(before)
    return [*found, text]


def _failures() -> tuple[type[Exception], ...]:
    """What rendering a template can raise."""
    import jinja2

    return (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, OverflowError)


def _renderer(source: str, special_tokens: Mapping[str, str]) -> Callable[..., str]:
    """A function that renders a user's turn, and a reply if given one, thinking turned off."""
    import jinja2.meta

    environment = _environment()
    try:
        template = environment.from_string(source)
        reads = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        raise UnsupportedModelError(f"the chat template does not compile: {error}") from None
    switches = {name: value for name, value in THINKING_OFF.items() if name in reads}
    if "reasoning_effort" in reads:
        switches["reasoning_effort"] = "none" if re.search(r"[\"']none[\"']", source) else "low"

    def render(*turns: Any, prompt: bool) -> str:
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=False)]
        values = {"tools": None, "documents": None, **special_tokens, **switches}
        return str(template.render(messages=messages, add_generation_prompt=prompt, **values))

    return render


def _between(text: str) -> str | None:
    """What stands between the user's mark and the reply's."""
    if text.count(MARK) == 1 and text.count(REPLY) == 1 and text.index(MARK) < text.index(REPLY):
        return text.split(MARK)[1].split(REPLY)[0]
    return None


def _without_thinking(closing: str) -> str:
    """The closing with a thought it leaves open closed again, and a channel chosen where replies come in channels."""
    if closing.endswith("<|start|>assistant"):  # gpt-oss: the next token would name a channel
        return closing + "<|channel|>final<|message|>"
    tags = list(THOUGHT.finditer(closing))
    if tags and not (tags[-1].group(1) or tags[-1].group(3)):
        angle, square = tags[-1].group(2), tags[-1].group(4)
        return closing.rstrip("\n") + "\n\n" + (f"</{angle}>" if angle else f"[/{square}]") + "\n\n"
    return closing


def _environment() -> Any:
    """A Jinja sandbox with what Transformers gives to chat templates."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the reply for training; here its body is written as it is."""

        tags = set(("generation",))  # noqa: C405, RUF012  (the base class wants a set)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """A namespace that refuses names with an underscore in front, by which a template could leave the sandbox."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                _public(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _public(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        dict=lambda *args, **kwargs: dict(*args, **kwargs),
        namespace=Namespace,
    )
    return environment


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise UnsupportedModelError(f"the chat template stores the private name {name!r}")
