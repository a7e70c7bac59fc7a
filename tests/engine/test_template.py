"""What a chat template writes around one user turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sakuradite.engine.template import Frame, frame_of, read_template, turn_of
from sakuradite.errors import UnsupportedModelError
from tests.checkpoints import TEMPLATES
from tests.engine.zoo import CHATML, LLAMA2

OPENING, CLOSING = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
PROMPT = "{% if add_generation_prompt %}"


def chatml_with(prompt: str) -> str:
    """ChatML with something else for its generation prompt."""
    turns = CHATML.split("{% if add_generation_prompt %}")[0]
    return turns + PROMPT + prompt + "{% endif %}"


@pytest.mark.parametrize(
    ("template", "frame"),
    [
        pytest.param(CHATML, Frame(OPENING, CLOSING), id="chatml"),
        pytest.param(TEMPLATES["no-system"], Frame(OPENING, CLOSING), id="refuses a system turn"),
        pytest.param(
            TEMPLATES["thinking"], Frame(OPENING, CLOSING + "<think>\n\n</think>\n\n"), id="knows enable_thinking"
        ),
        pytest.param(
            chatml_with("{{ '<|im_start|>assistant\n<think>\n' }}"),
            Frame(OPENING, CLOSING + "<think>\n\n</think>\n\n"),
            id="always opens a thought",
        ),
        pytest.param(
            chatml_with("{{ '<|im_start|>assistant\n' + ('</think>' if not thinking else '<think>') }}"),
            Frame(OPENING, CLOSING + "</think>"),
            id="knows thinking",
        ),
        pytest.param(
            chatml_with("{{ '[THINK]' }}"), Frame(OPENING, "<|im_end|>\n[THINK]\n\n[/THINK]\n\n"), id="square brackets"
        ),
        pytest.param(
            chatml_with("{{ '<|start|>assistant' }}"),
            Frame(OPENING, "<|im_end|>\n<|start|>assistant<|channel|>final<|message|>"),
            id="replies in channels",
        ),
        pytest.param(
            chatml_with("{{ reasoning_effort }}"), Frame(OPENING, "<|im_end|>\nlow"), id="reasoning effort, any word"
        ),
        pytest.param(
            chatml_with("{{ reasoning_effort if reasoning_effort in ['none', 'high'] else raise_exception('!') }}"),
            Frame(OPENING, "<|im_end|>\nnone"),
            id="reasoning effort, none",
        ),
        pytest.param(LLAMA2, Frame("<s>[INST] ", " [/INST] "), id="no generation prompt"),
        pytest.param(
            "{% for m in messages %}{% for part in m.content %}U:{{ part.text }}\n{% endfor %}{% endfor %}A:",
            Frame("U:", "\nA:"),
            id="content in parts",
        ),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}"
            "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% generation %}g{% endgeneration %}"
            "{{ {'a': 'ü<'} | tojson }}{{ strftime_now('%%') }}{{ tools is none }}{{ add_generation_prompt }}",
            Frame("1", 'g{"a": "ü<"}%TrueTrue'),
            id="all that Transformers offers",
        ),
        pytest.param("{{ bos_token }}{{ pad_token }}{{ messages[0].content }}:", Frame("<s>", ":"), id="unset tokens"),
    ],
)
def test_the_frame_of_a_template(template: str, frame: Frame) -> None:
    assert frame_of(template, {"bos_token": "<s>", "eos_token": "</s>"}) == frame


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ raise_exception('one user turn is not enough') }}", "one user turn is not enough"),
        ("Hello", "exactly once"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "exactly once"),
        ("{{ messages.__class__.__mro__ }}{{ messages[0].content }}", "unsafe"),
        ("{{ messages.append(1) }}{{ messages[0].content }}", "unsafe"),
        ("{% set ns = namespace(__init__=1) %}{{ messages[0].content }}", "__init__"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_its_reason(template: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        frame_of(template, {})


def test_where_a_template_is_read_from(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "D"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert read_template(tmp_path) == "one"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert read_template(tmp_path) == "of the processor"
    (tmp_path / "chat_template.jinja").write_text("a file\n")
    assert read_template(tmp_path) == "a file\n"


def test_rendering_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from tests.engine.zoo import qwen

    reference = PreTrainedTokenizerFast(tokenizer_file=str(qwen(tmp_path) / "tokenizer.json"), bos_token="<s>")
    for template in (CHATML, LLAMA2, TEMPLATES["no-system"]):
        assert template is not None
        frame = frame_of(template, {"bos_token": "<s>"})
        text = reference.apply_chat_template(
            [{"role": "user", "content": "a question"}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert (frame.opening + "a question" + frame.closing).rstrip(" ") == text


SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
HOISTING = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    "{{ ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "parts", "texts"),
    [
        pytest.param(
            SMOLVLM,
            (False, False, True),
            ("<|im_start|>User:<image><image>", "<end_of_utterance>\nAssistant:"),
            id="images first",
        ),
        pytest.param(
            SMOLVLM,
            (True, False, True),
            ("<|im_start|>User: ", "<image>", "<end_of_utterance>\nAssistant:"),
            id="an image between texts",
        ),
        pytest.param(
            HOISTING, (True, False, True), ("USER: <image>\n", "", " ASSISTANT:"), id="the template puts images first"
        ),
        pytest.param(
            CHATML, (False, True), (OPENING + "<image>", CLOSING), id="the template takes text alone: written into it"
        ),
        pytest.param(None, (False, True), ("<image>", ""), id="no template"),
    ],
)
def test_a_turn_with_images(source: str | None, parts: tuple[bool, ...], texts: tuple[str, ...]) -> None:
    assert turn_of(source, (), parts, "<image>") == texts


def test_a_turn_of_many_parts() -> None:
    parts = (True, False) * 12
    assert turn_of(SMOLVLM, (), parts, "<image>")[1:-1] == ("<image>",) * 11


def test_a_template_that_drops_images_is_refused() -> None:
    source = "{% for c in messages[0]['content'] %}{{ c['text'] if c['type'] == 'text' }}{% endfor %}"
    with pytest.raises(UnsupportedModelError, match="cannot show a turn with images"):
        turn_of(source, (), (False, True), "<image>")
