"""A GGUF file as a checkpoint: its facts, and its conversion into an ordinary checkpoint folder, done once.

Transformers reads GGUF too (`gguf_file=`), but takes ten times as long at every load and loses the digit splitting and
the normaliser of some tokenizers. A converted folder is read by every backend, and by the same code as any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakuradite.errors import (
    InsufficientStorageError,
    MissingExtraError,
    ModelLoadFailedError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from sakuradite.hub import gguf_model, gguf_tokenizer
from sakuradite.hub.safety import private_folder
from sakuradite.operations import Progress

type OnProgress = Callable[[Progress], None]

FORMAT = 1  # raise when the same file would be converted differently: folders of an older format are made anew
SPARE_BYTES = 64 << 20  # left free beside the weights, for the tokenizer and the file system
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class GGUFFacts:
    """What a GGUF file says about its model. `refusal` is the reason why it cannot be loaded, None when it can."""

    architecture: str | None
    model_type: str | None
    context_length: int | None
    vocabulary_size: int | None
    quantization: str
    """The type of most of its weights, such as Q4_K."""
    dtype: str
    """What it becomes when it is loaded: a quantised file becomes bfloat16."""
    weight_bytes: int
    parameters: int
    tokenizer: str | None
    chat_template: bool
    refusal: str | None


def inspect(path: Path) -> GGUFFacts:
    """The facts of a GGUF file, from its metadata alone.

    Raises ModelNotFoundError where there is no file, UnsupportedModelError where it is broken or not GGUF.
    """
    fields, tensors = _read(path)
    architecture = fields.get("general.architecture")
    class_name, model_type = gguf_model.ARCHITECTURES.get(str(architecture), (architecture, architecture))
    pre = fields.get("tokenizer.ggml.pre")
    return GGUFFacts(
        architecture=class_name,
        model_type=model_type,
        context_length=fields.get(f"{architecture}.context_length"),
        vocabulary_size=len(fields.get("tokenizer.ggml.tokens", ())) or None,
        quantization=_main_type(tensors),
        dtype=_dtype(tensors),
        weight_bytes=sum(int(t.n_bytes) for t in tensors.values()),
        parameters=sum(int(t.n_elements) for t in tensors.values()),
        tokenizer=pre or fields.get("tokenizer.ggml.model"),
        chat_template="tokenizer.chat_template" in fields,
        refusal=_refusal(fields, tensors),
    )


def to_checkpoint(path: Path, home: Path, on_progress: OnProgress | None = None) -> Path:
    """The checkpoint folder of a GGUF file, under `home`/converted; made on the first call and kept.

    A file that has changed since (size or time) is converted anew. Raises ModelNotFoundError, UnsupportedModelError
    (refused or broken, with the reason), InsufficientStorageError.
    """
    path = path.expanduser().absolute()
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelNotFoundError(f"{path}: {error.strerror}") from None
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    source = {"format": FORMAT, "path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return converted(home / "converted" / f"{path.stem}-{place}", source, lambda: path, on_progress)


def converted(
    folder: Path, source: Mapping[str, Any], locate: Callable[[], Path], on_progress: OnProgress | None = None
) -> Path:
    """`folder`, made from the GGUF file that `locate` finds unless it is there and was made from the same `source`.

    The folder appears under its name only when it is whole. Of several processes one converts and the others wait.
    """
    from filelock import FileLock

    if _made_from(folder) == source:
        return folder
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private_folder(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if _made_from(folder) == source:
            return folder
        partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        private_folder(partial)
        try:
            _convert(locate(), partial, on_progress or (lambda progress: None))
            _write(partial / "source.json", source)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
        finally:
            for leftover in (partial, old):
                shutil.rmtree(leftover, ignore_errors=True)
    return folder


def _made_from(folder: Path) -> Any:
    try:
        return json.loads((folder / "source.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadFailedError(f"{folder / 'source.json'} cannot be read ({error}): delete {folder}") from None


def _convert(path: Path, folder: Path, on_progress: OnProgress) -> None:
    """Write the checkpoint of one GGUF file into an empty folder."""
    fields, tensors = _read(path)
    if reason := _refusal(fields, tensors):
        raise UnsupportedModelError(f"{path} is refused: {reason}")
    dtype, architecture = _dtype(tensors), fields["general.architecture"]
    names = gguf_model.names(architecture, fields[f"{architecture}.block_count"], tensors)
    total = sum(int(tensors[name].n_elements) for name in names) * BYTES[dtype]
    needed, free = total + SPARE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise InsufficientStorageError(f"converting {path} needs {needed} bytes in {folder.parent}, {free} are free")
    on_progress(Progress(phase="converting", bytes_done=0, bytes_total=total))

    factors = tensors.get(gguf_model.ROPE_FACTORS)
    config = gguf_model.config(fields, tensors, dtype, None if factors is None else _values(factors))
    _write(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    _write(folder / "generation_config.json", special)
    _write(folder / "tokenizer_config.json", gguf_tokenizer.settings(fields, config["max_position_embeddings"]))
    gguf_tokenizer.build(fields).save(str(folder / "tokenizer.json"))

    shapes = {new: tuple(int(n) for n in reversed(tensors[old].shape)) for old, new in names.items()}
    done = 0
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_safetensors_header(shapes, dtype))
        for old in names:
            weight = gguf_model.arranged(architecture, fields, old, _values(tensors[old]))
            done += out.write(_bytes(weight, dtype))
            on_progress(Progress(phase="converting", bytes_done=done, bytes_total=total))
        out.flush()
        os.fsync(out.fileno())
    on_progress(Progress(phase="done", bytes_done=total, bytes_total=total))


def _safetensors_header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    """The head of a safetensors file: the length of the JSON, then the JSON, padded to eight bytes.

    Written here because the library takes all weights at once, and has no bfloat16 without torch; this way a
    conversion holds one tensor in memory, whatever the size of the model.
    """
    kind, offset = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype], 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(weight: NDArray[np.float32], dtype: str) -> bytes:
    """A tensor's numbers in the given type; bfloat16 is rounded to the nearest, ties to even."""
    if dtype != "bfloat16":
        return weight.astype(dtype).tobytes()
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _values(tensor: Any) -> NDArray[np.float32]:
    """A tensor as float32 in its own shape."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return np.asarray(values, np.float32).reshape(tuple(int(n) for n in reversed(tensor.shape)))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata by key and tensors by name, mapped from the file."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise MissingExtraError("reading a GGUF file", "torch") from None
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise ModelNotFoundError(f"{path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UnsupportedModelError(f"{path} is not a whole GGUF file: {error}") from None
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _refusal(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> str | None:
    """Why this file cannot be loaded, None when it can: its model, its tokenizer, its quantisation."""
    return (
        gguf_model.refusal(fields, tensors)
        or gguf_tokenizer.refusal(fields)
        or _unreadable({tensor.tensor_type for tensor in tensors.values()})
    )


def _unreadable(kinds: Iterable[Any]) -> str | None:
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind in kinds:
        _, block_bytes = GGML_QUANT_SIZES[kind]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            return f"its quantisation {kind.name} cannot be read"
    return None


def _main_type(tensors: Mapping[str, Any]) -> str:
    """The type of most weights, counted by number: a file's norms are float32 whatever its matrices are."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return counts.most_common(1)[0][0] if counts else "none"


def _dtype(tensors: Mapping[str, Any]) -> str:
    return {"F32": "float32", "F16": "float16"}.get(_main_type(tensors), "bfloat16")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
