"""The examples of the API reference. A test posts each request to a server and checks each response's shape."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from sakuradite.http.site import Example

MODEL = "Qwen/Qwen3-0.6B"
TICKET = "I was charged twice for my March invoice and the refund I was promised still has not arrived."


def _pixel() -> str:
    """A PNG of one red pixel as a data URL: small enough to read, whole enough to send."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header, pixel = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0), zlib.compress(b"\x00\xff\x00\x00", 9)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    return base64.b64encode(png).decode()


PIXEL = _pixel()

NOUL = {"type": "noul", "instructions": "The customer asks for money back."}
CHOICE = {
    "type": "choice",
    "instructions": "Which team should handle this?",
    "criteria": {"billing": "Payments, invoices, refunds", "technical": "Bugs and outages", "sales": None},
}
SCORE = {
    "type": "score",
    "instructions": "How frustrated is the customer?",
    "criteria": ["calm", "frustrated", "very angry"],
}
NOUL_ANSWER = {"type": "noul", "noul": 0.97, "x_label_mass": 0.99}
CHOICE_ANSWER = {
    "type": "choice",
    "choice": "billing",
    "confidence": 0.82,
    "probabilities": {"billing": 0.88, "technical": 0.08, "sales": 0.04},
    "x_label_mass": 0.98,
}
SCORE_ANSWER = {
    "type": "score",
    "score": 1.05,
    "confidence": 0.925,
    "legend": {"0": "calm", "1": "frustrated", "2": "very angry"},
    "probabilities": {"0": 0.0, "1": 0.95, "2": 0.05},
    "x_label_mass": 0.98,
}


def _usage(tokens: int) -> dict[str, int]:
    return {"input_tokens": tokens, "output_tokens": 0}


def _native(answers: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "answers": answers, "usage": _usage(tokens)}


def _request(questions: dict[str, Any], state: Any = TICKET, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "state": state, "questions": questions, **more}


DECISIONS = (
    Example(
        "text",
        "Three questions about a text, one of each type",
        _request({"refund": NOUL, "team": CHOICE, "mood": SCORE}),
        _native({"refund": NOUL_ANSWER, "team": CHOICE_ANSWER, "mood": SCORE_ANSWER}, 402),
    ),
    Example(
        "noul",
        "Noul: is it true? Criteria say what counts on either side",
        _request(
            {
                "dispute": {
                    "type": "noul",
                    "instructions": "The customer threatens to dispute the charge.",
                    "criteria": {"true": "A chargeback or the bank is mentioned as a next step", "false": None},
                }
            }
        ),
        _native({"dispute": {**NOUL_ANSWER, "noul": 0.11}}, 131),
    ),
    Example(
        "choice",
        "Choice: which option fits? A description may be null, or JSON",
        _request({"team": CHOICE}, state={"subject": "Charged twice", "body": TICKET}),
        _native({"team": CHOICE_ANSWER}, 148),
    ),
    Example(
        "score",
        "Score: where on an ordered list? Levels from the lowest to the highest",
        _request({"mood": SCORE}),
        _native({"mood": SCORE_ANSWER}, 139),
    ),
    Example(
        "image",
        "A question about an image; the model must have vision",
        _request(
            {"red": {"type": "noul", "instructions": "The picture is mostly red."}},
            state="Look at the picture.",
            images=[f"data:image/png;base64,{PIXEL}"],
        ),
        _native({"red": NOUL_ANSWER}, 164),
    ),
    Example(
        "stream",
        "Answers as events, each when it is ready",
        _request({"refund": NOUL}, stream=True),
        [
            {"type": "answer", "model": MODEL, "key": "refund", "answer": NOUL_ANSWER, "usage": _usage(127)},
            {"type": "complete", **_native({"refund": NOUL_ANSWER}, 127)},
        ],
    ),
    Example(
        "openai",
        "The dialect of the openai client: input, and an array of questions",
        {
            "model": MODEL,
            "input": TICKET,
            "questions": [
                {"type": "predicate", "name": "refund", "instructions": "The customer asks for money back."},
                {
                    "type": "choice",
                    "instructions": "Which team should handle this?",
                    "choices": [{"value": "billing", "description": "Payments, refunds"}, {"value": "technical"}],
                },
                {
                    "type": "score",
                    "instructions": "How frustrated is the customer?",
                    "levels": [{"label": "calm"}, {"label": "frustrated"}, {"label": "very angry"}],
                },
            ],
        },
        {
            "model": MODEL,
            "answers": [
                {"type": "predicate", "name": "refund", "probability": 0.97},
                {
                    "type": "choice",
                    "name": None,
                    "choice": "billing",
                    "confidence": 0.8,
                    "probabilities": [
                        {"value": "billing", "probability": 0.9},
                        {"value": "technical", "probability": 0.1},
                    ],
                },
                {
                    "type": "score",
                    "name": None,
                    "score": 1.05,
                    "confidence": 0.925,
                    "probabilities": [
                        {"value": 0, "label": "calm", "probability": 0.0},
                        {"value": 1, "label": "frustrated", "probability": 0.95},
                        {"value": 2, "label": "very angry", "probability": 0.05},
                    ],
                },
            ],
            "usage": {
                "input_tokens": 398,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 398,
            },
        },
    ),
)

SYSTEM_ONE = (
    Example(
        "alias",
        "By alias; the response names the real model",
        {**_request({"refund": NOUL, "team": CHOICE, "mood": SCORE}), "model": "jev-latest"},
        _native({"refund": NOUL_ANSWER, "team": CHOICE_ANSWER, "mood": SCORE_ANSWER}, 402),
    ),
    Example(
        "asset",
        "An image where its placeholder stands",
        _request(
            {"red": {"type": "noul", "instructions": "The picture is mostly red."}},
            state="The customer sent this: <photo>",
            assets={"<photo>": {"type": "image", "format": "png", "data_base64": PIXEL}},
        ),
        _native({"red": NOUL_ANSWER}, 164),
    ),
)

MODELS = (
    Example(
        "models",
        "One model and its alias",
        None,
        {
            "models": [
                {
                    "name": MODEL,
                    "description": "Qwen3ForCausalLM, bfloat16, text, 8192 tokens a question",
                    "release_date": "2025-04-27",
                },
                {"name": "jev-latest", "description": f"Alias of {MODEL}", "release_date": "2025-04-27"},
            ],
            "object": "list",
            "data": [
                {"id": MODEL, "object": "model", "created": 1745712000, "owned_by": "sakuradite"},
                {"id": "jev-latest", "object": "model", "created": 1745712000, "owned_by": "sakuradite"},
            ],
        },
    ),
)

HEALTH = (Example("alive", "Alive", None, {"status": "ok"}),)
READY = (Example("ready", "Ready", None, {"status": "ready"}),)

LOADING = {
    "id": "op_5f0c2a",
    "kind": "load",
    "model": MODEL,
    "status": "running",
    "progress": {"phase": "downloading", "bytes_done": 524288000, "bytes_total": 1503300328},
    "result": None,
    "error": None,
    "created": 1790000000.0,
    "finished": None,
}
STATUS: dict[str, Any] = {
    "model": MODEL,
    "status": "unloaded",
    "config": None,
    "capabilities": None,
    "replicas": {"target": 0, "ready": 0},
    "storage": {
        "managed": True,
        "path": "/home/me/.sakuradite/models/Qwen--Qwen3-0.6B",
        "bytes": 1519000000,
        "revision": "c1899de289a04d12100db370d81485cdf75e47ca",
        "complete": True,
    },
    "aliases": [],
    "operation_id": None,
    "last_error": None,
    "loaded_at": None,
}

ADMIN_MODELS = (Example("stored", "One stored model", None, [STATUS]),)
INSPECT = (
    Example(
        "inspect",
        "A hub checkpoint",
        {"model": MODEL},
        {
            "model": MODEL,
            "revision": "c1899de289a04d12100db370d81485cdf75e47ca",
            "architecture": "Qwen3ForCausalLM",
            "model_type": "qwen3",
            "modalities": ["text"],
            "context_length": 40960,
            "vocabulary_size": 151936,
            "dtype": "bfloat16",
            "quantization": None,
            "weight_bytes": 1503300328,
            "parameters": 596049920,
            "tokenizer": "Qwen2TokenizerFast",
            "chat_template": True,
            "prefix_reuse": "full attention",
            "backends": {"torch": {"supported": True, "reason": None}},
            "files": {"config.json": 726, "model.safetensors": 1503300328},
            "calibrated": False,
        },
    ),
)
PULL = (Example("pull", "Download, do not load", {"model": MODEL}, {**LOADING, "kind": "pull"}),)
LOAD = (
    Example("load", "With the defaults", {"model": MODEL}, LOADING),
    Example(
        "replicas",
        "Two replicas of half a GPU each",
        {"model": MODEL, "backend": "torch", "dtype": "bfloat16", "replicas": 2, "num_gpus": 0.5},
        LOADING,
    ),
)
UNLOAD = (Example("unload", "Free the memory", {"model": MODEL}, STATUS),)
OPERATIONS = (Example("running", "One operation", None, [LOADING]),)
OPERATION = (
    Example("running", "Still downloading", None, LOADING),
    Example(
        "failed",
        "A failed one is still answered with 200",
        None,
        {
            **LOADING,
            "status": "failed",
            "progress": {"phase": "done", "bytes_done": None, "bytes_total": None},
            "error": {
                "code": "insufficient_resources",
                "message": "the model asks for 1 GPU, the cluster has 0",
                "status_code": 422,
            },
            "finished": 1790000004.0,
        },
    ),
)
ALIASES = (Example("aliases", "The default model", None, [{"alias": "default", "model": MODEL}]),)
SET_ALIAS = (Example("set", "Name a model", {"model": MODEL}, {"alias": "triage", "model": MODEL}),)
