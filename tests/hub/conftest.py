"""Fixtures of the hub tests: a stand-in hub, a home, and checkpoints made of a few bytes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from sakuradite.hub import remote
from sakuradite.hub.remote import Hub
from sakuradite.hub.store import Store
from tests.hub.standin import StandIn

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "dtype": "bfloat16",
}


def safetensors(tensors: Mapping[str, tuple[str, list[int]]], fill: int = 7) -> bytes:
    """A safetensors file of the given dtypes and shapes."""
    width = {"F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        count = 1
        for length in shape:
            count *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count * width[dtype]]}
        end += count * width[dtype]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes([fill]) * end


def checkpoint(weights: int = 20_000, config: Mapping[str, Any] = LLAMA, **files: bytes) -> dict[str, bytes]:
    """The files of a checkpoint whose weights have `weights` bfloat16 numbers; more by keyword, dots as `__`."""
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b'{"version": "1.0"}' + b" " * 2000,
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": safetensors({"model.embed_tokens.weight": ("BF16", [weights // 100, 100])}),
        "README.md": b"# a card",
        "modeling_llama.py": b"raise SystemExit('this must never run')",
    } | {name.replace("__", "."): data for name, data in files.items()}


def sharded(count: int = 3, weights: int = 20_000) -> dict[str, bytes]:
    """The files of a checkpoint in several weight files."""
    files = checkpoint()
    del files["model.safetensors"]
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for n, name in enumerate(names):
        files[name] = safetensors({f"layer{n}": ("BF16", [weights])}, fill=n)
    index = {"metadata": {}, "weight_map": {f"layer{n}": name for n, name in enumerate(names)}}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A checkpoint folder on disk."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def environment(standin: StandIn, **more: str) -> dict[str, str]:
    """What a process of its own sees: the stand-in for a hub, no login."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    return kept | {"HF_ENDPOINT": standin.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def start(script: str, *arguments: str, environment: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    """A Python of its own that runs a script."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=environment, text=True, stdout=subprocess.PIPE, **options
    )


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A hub of this test's own, which huggingface_hub takes for the hub; no login and no cache of this machine's."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(remote, "RETRY_WAIT", 0.01)
    server = StandIn()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.close()
    close_session()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path, standin: StandIn) -> Store:
    return Store(home, Hub(standin.endpoint))
