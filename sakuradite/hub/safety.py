"""What is refused before it can do harm, and the words that say why: code in a repository, pickles, names that leave
the store, folders that others can read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sakuradite.errors import ConfigurationError, UnsupportedModelError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER_FRAMEWORKS = (".h5", ".msgpack", ".onnx", ".tflite", ".ot")

CUSTOM_CODE = (
    "it needs Python code from its repository (auto_map in config.json), and custom code is not run: only models that "
    "the installed libraries know by themselves are loaded"
)
NO_FAST_TOKENIZER = (
    "it has no fast tokenizer (tokenizer.json). Convert it once: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def plain_name(name: str) -> bool:
    """Whether a file name has one component, and nothing that could lead out of a folder or hide in it."""
    return _PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def why_no_weights(names: Mapping[str, Any]) -> str:
    """Why a set of files without `model*.safetensors` is no checkpoint that can be loaded."""

    def some(*suffixes: str) -> str | None:
        return next((name for name in sorted(names) if name.endswith(suffixes)), None)

    if found := some(*_PICKLES):
        return (
            f"its weights are pickles ({found}), which can run code when they are opened; only safetensors are read. "
            "Take a revision or a copy with model.safetensors"
        )
    if "adapter_config.json" in names:
        return "it is an adapter (adapter_config.json) without the model it belongs to; merge it into its base first"
    if found := some(".gguf"):
        return f"it holds GGUF files ({found}): download one and give the path of the .gguf file"
    if "model_index.json" in names:
        return "it is a diffusion pipeline (model_index.json), no language model"
    if found := some(".safetensors"):
        return f"it has {found}, but neither model.safetensors nor model.safetensors.index.json"
    if found := some(*_OTHER_FRAMEWORKS):
        return f"its weights are of another framework ({found}); only safetensors are read"
    return "it has no weights (model.safetensors)"


def json_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises UnsupportedModelError naming the file."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{name} holds no JSON object")
    return value


def private_folder(path: Path) -> Path:
    """Make (or tighten) a folder that only its owner can enter. A symlink, or somebody else's folder, is refused."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{path} is a symlink or a file where a folder of the store should be; move it away")
    if os.name == "posix":
        if found.st_uid != os.geteuid():
            raise ConfigurationError(f"{path} belongs to user {found.st_uid}; the store only uses its owner's folders")
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    return path


def regular_file_size(path: Path) -> int | None:
    """The size of a file that is really there: None for a symlink, a folder, or nothing."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
