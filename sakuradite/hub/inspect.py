"""Facts about a checkpoint without its weights: of a folder, a GGUF file, a stored model, or one on the hub.

Of a hub model a few small files and the heads of the weight files are read, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub import support, weights
from sakuradite.hub.names import check_revision, local_path
from sakuradite.hub.registry import check_code
from sakuradite.hub.remote import Hub, RemoteSnapshot
from sakuradite.hub.safety import NO_FAST_TOKENIZER, json_object
from sakuradite.hub.selection import CONFIG, folder_sizes, select
from sakuradite.hub.store import Store
from sakuradite.operations import Inspection

READERS = 8  # heads of weight files at once: a large model has dozens of them
TOKENIZER = "tokenizer.json"
CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the files are: their sizes, and how to read from them."""

    sizes: Mapping[str, int]
    read: Callable[[str], bytes]
    read_range: Callable[[str, int, int], bytes]


def inspect(
    model: str, *, revision: str | None = None, offline: bool = False, home: Path, hub: Hub | None = None
) -> Inspection:
    """What can be known of a model before it is loaded, and whether each backend could load it here.

    A checkpoint that is refused is described too, with the reasons under `backends`. Raises ModelNotFoundError,
    ModelAccessDeniedError, HubUnavailableError, OfflineMissingError; UnsupportedModelError for what is no checkpoint.
    """
    if path := local_path(model):
        if revision is not None:
            raise UnsupportedModelError(f"{path} is on this machine's disk and has no revisions", param="revision")
        if path.is_dir():
            return _describe(str(path), None, _folder(path))
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{path} is neither a checkpoint folder nor a .gguf file", param="model")
        return _describe_gguf(path)
    store = Store(home, hub)
    if found := store.find(model, revision):
        return _describe(model, found.revision, _folder(found.path))
    if offline or is_offline_mode():
        found = store.pull(model, revision, offline=offline)
        return _describe(model, found.revision, _folder(found.path))
    remote = store.hub.snapshot(model, check_revision(revision))
    return _describe(model, remote.commit, _hub(store.hub, remote))


def _describe(model: str, revision: str | None, source: _Source) -> Inspection:
    config, refusal = _config(source)
    names: tuple[str, ...] = tuple(source.sizes)
    tensors: dict[str, weights.Tensor] = {}
    weight_bytes = None
    if refusal is None:
        try:
            check_code(config)
            selection = select(source.sizes, source.read)
            names = selection.names
            with ThreadPoolExecutor(READERS) as readers:
                for head in readers.map(partial(_head, source), selection.weights):
                    tensors |= head
            weight_bytes = sum(source.sizes[name] for name in selection.weights)
        except UnsupportedModelError as error:
            refusal = error.message
    if refusal is None and TOKENIZER not in source.sizes:
        refusal = NO_FAST_TOKENIZER
    settings = support.resolved(config) if config else None
    text = settings.get_text_config().to_dict() if settings is not None else _text_config(config)
    dtype = _dtype(config, tensors)
    tokenizer = _optional(source, "tokenizer_config.json")
    return Inspection(
        model=model,
        revision=revision,
        architecture=_first(config.get("architectures")),
        model_type=config.get("model_type"),
        modalities=("text", "image") if isinstance(config.get("vision_config"), dict) else ("text",),
        context_length=next((text[key] for key in CONTEXTS if isinstance(text.get(key), int)), None),
        vocabulary_size=text.get("vocab_size"),
        dtype=dtype,
        quantization=weights.quantization(config),
        weight_bytes=weight_bytes,
        parameters=weights.parameters(tensors, config) if tensors else None,
        tokenizer=tokenizer.get("tokenizer_class", TOKENIZER) if TOKENIZER in source.sizes else None,
        chat_template="chat_template" in tokenizer
        or any(name in source.sizes for name in ("chat_template.jinja", "chat_template.json")),
        prefix_reuse=support.prefix_reuse(config, dtype) if config else None,
        backends=support.backends(config, refusal),
        files={name: source.sizes[name] for name in names},
    )


def _describe_gguf(path: Path) -> Inspection:
    from sakuradite.hub import gguf

    facts = gguf.inspect(path)
    known = {"model_type": facts.model_type, "architectures": [facts.architecture]}
    return Inspection(
        model=str(path),
        architecture=facts.architecture,
        model_type=facts.model_type,
        context_length=facts.context_length,
        vocabulary_size=facts.vocabulary_size,
        dtype=facts.dtype,
        quantization=facts.quantization,
        weight_bytes=facts.weight_bytes,
        parameters=facts.parameters,
        tokenizer=facts.tokenizer,
        chat_template=facts.chat_template,
        prefix_reuse=None if facts.refusal else support.prefix_reuse(known, facts.dtype),
        backends=support.backends(known, facts.refusal),
        files={path.name: path.stat().st_size},
    )


def _head(source: _Source, name: str) -> dict[str, weights.Tensor]:
    return weights.read_head(name, source.sizes[name], partial(source.read_range, name))


def _folder(path: Path) -> _Source:
    def read_range(name: str, start: int, stop: int) -> bytes:
        with (path / name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    return _Source(folder_sizes(path), lambda name: (path / name).read_bytes(), read_range)


def _hub(hub: Hub, remote: RemoteSnapshot) -> _Source:
    return _Source(
        remote.sizes,
        lambda name: hub.read(remote, name),
        lambda name, start, stop: hub.read_range(remote, name, start, stop),
    )


def _config(source: _Source) -> tuple[dict[str, Any], str | None]:
    """config.json, or nothing and why."""
    if CONFIG not in source.sizes:
        try:
            select(source.sizes, source.read)
        except UnsupportedModelError as error:
            return {}, error.message
    try:
        config = json_object(source.read(CONFIG), CONFIG)
    except UnsupportedModelError as error:
        return {}, error.message
    return config, None if isinstance(config.get("model_type"), str) else "its config.json names no model_type"


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own settings, where a checkpoint of several parts nests them."""
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) and isinstance(config, dict) else config


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, weights.Tensor]) -> str | None:
    text = _text_config(config)
    return next(
        (c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if isinstance(c.get(key), str)),
        weights.main_dtype(tensors),
    )


def _optional(source: _Source, name: str) -> dict[str, Any]:
    return json_object(source.read(name), name) if name in source.sizes else {}


def _first(names: Any) -> str | None:
    return str(names[0]) if isinstance(names, list) and names else None
