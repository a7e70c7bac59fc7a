"""Which files of a repository or folder make up a checkpoint: its settings, its fast tokenizer, its safetensors.

Everything else stays where it is: other formats, other precisions, training state, and code above all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.safety import json_object, plain_name, why_no_weights

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEMPLATES = "additional_chat_templates/"
SETTINGS = frozenset(
    (
        CONFIG, "generation_config.json", "quantize_config.json", "hf_quant_config.json",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
        "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
        "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
        "video_preprocessor_config.json",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selection:
    """File names of a checkpoint."""

    settings: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings + self.weights


def select(sizes: Mapping[str, int], read: Callable[[str], bytes]) -> Selection:
    """The files that a load needs, out of those that are there (bytes by name); `read` fetches a small one.

    Raises UnsupportedModelError with the reason when they are no checkpoint that can be loaded.
    """
    settings = tuple(sorted(name for name in sizes if name in SETTINGS or _is_template(name)))
    if CONFIG not in sizes and SINGLE not in sizes and INDEX not in sizes:
        raise UnsupportedModelError(why_no_weights(sizes))
    if CONFIG not in sizes:
        raise UnsupportedModelError("it has no config.json")
    if SINGLE in sizes:
        return Selection(settings, (SINGLE,))
    if INDEX in sizes:
        return Selection((*settings, INDEX), shards(read(INDEX), sizes))
    raise UnsupportedModelError(why_no_weights(sizes))


def shards(index: bytes, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The weight files that an index names. Raises UnsupportedModelError for one that is missing or badly named."""
    weight_map = json_object(index, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{INDEX} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not plain_name(name) or not name.endswith(".safetensors"):
            raise UnsupportedModelError(f"{INDEX} names {name!r}, which is no safetensors file of the same folder")
        if name not in sizes:
            raise UnsupportedModelError(f"{INDEX} names {name}, which is not there: the checkpoint is incomplete")
    return tuple(names)


def folder_names(folder: Path) -> list[str]:
    """The names of a checkpoint folder's files, those of a repository's form."""
    found = (*folder.glob("*"), *folder.glob(TEMPLATES + "*.jinja"))
    return [path.relative_to(folder).as_posix() for path in sorted(found) if path.is_file()]


def folder_sizes(folder: Path) -> dict[str, int]:
    """Bytes by name of a checkpoint folder's files."""
    return {name: (folder / name).stat().st_size for name in folder_names(folder)}


def _is_template(name: str) -> bool:
    return name.startswith(TEMPLATES) and name.endswith(".jinja") and plain_name(name.removeprefix(TEMPLATES))
