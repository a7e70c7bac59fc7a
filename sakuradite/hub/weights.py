"""How many weights a checkpoint has, and of which type, from the heads of its safetensors files alone.

A safetensors file starts with the length of its head (8 bytes, little endian) and the head, JSON: for each tensor its
dtype, shape and place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.safety import json_object

MAX_HEAD = 100_000_000  # bytes; the format's own limit
FIRST_READ = 100_000  # bytes of the first look, which holds the whole head of most files

NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "U32": "uint32", "BOOL": "bool",
}  # fmt: skip

type Read = Callable[[int, int], bytes]
"""Bytes from one place of a file to another."""


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    elements: int


def read_head(name: str, size: int, read: Read) -> dict[str, Tensor]:
    """The tensors of one file. Raises UnsupportedModelError where it is no safetensors file or is cut off."""
    start = read(0, min(size, FIRST_READ))
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= MAX_HEAD or 8 + length > size:
        raise UnsupportedModelError(f"{name} is not a whole safetensors file")
    head = start[8 : 8 + length] if 8 + length <= len(start) else start[8:] + read(len(start), 8 + length)
    tensors, end = {}, 0
    for key, value in json_object(head, f"the head of {name}").items():
        if key == "__metadata__":
            continue
        try:
            tensors[key] = Tensor(str(value["dtype"]), math.prod(int(n) for n in value["shape"]))
            end = max(end, int(value["data_offsets"][1]))
        except (KeyError, TypeError, ValueError, IndexError):
            raise UnsupportedModelError(f"the head of {name} describes {key!r} badly") from None
    if 8 + length + end != size:
        raise UnsupportedModelError(f"{name} has {size} bytes where its head announces {8 + length + end}: cut off")
    return tensors


def parameters(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """How many numbers the model was trained to: every tensor's elements, with packed ones counted by what they hold
    (an int32 of 4-bit weights holds eight) and the scales, zero points and tables that packing adds left out.
    """
    total = 0
    for name, tensor in tensors.items():
        total += int(tensor.elements * _values_per_element(name, tensor, tensors, config))
    return total


def main_dtype(tensors: Mapping[str, Tensor]) -> str | None:
    """The type that most elements have."""
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.elements
    return NAMES.get(found := counts.most_common(1)[0][0], found.lower()) if counts else None


def quantization(config: Mapping[str, Any]) -> str | None:
    """How the weights are packed, such as `gptq 4-bit` or `mlx 4-bit`; None when they are not."""
    method, bits = _packing(config)
    return None if method is None else f"{method} {bits}-bit" if bits else method


def _packing(config: Mapping[str, Any]) -> tuple[str | None, int | None]:
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and (method := settings.get("quant_method")):
        bits: Any = settings.get("bits")
        if settings.get("load_in_4bit"):
            bits = 4
        elif settings.get("load_in_8bit"):
            bits = 8
        elif isinstance(groups := settings.get("config_groups"), dict) and groups:  # compressed-tensors
            first = next(iter(groups.values()))
            bits = (first.get("weights") or {}).get("num_bits") if isinstance(first, dict) else None
        return str(method), bits if isinstance(bits, int) else None
    settings = config.get("quantization")  # mlx-lm's
    if isinstance(settings, dict) and isinstance(settings.get("bits"), int):
        return "mlx", settings["bits"]
    return None, None


def _values_per_element(name: str, tensor: Tensor, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> float:
    """How many of the model's numbers one element of a tensor holds; 0 for what only serves the packing."""
    method, bits = _packing(config)
    stem, _, last = name.rpartition(".")
    if method is None:
        return 1
    if method == "mxfp4":  # two 4-bit numbers in a byte
        return 2 if last.endswith("_blocks") else 0 if last.endswith("_scales") else 1
    if method in ("gptq", "awq"):
        return 32 / (bits or 4) if last == "qweight" else 0 if last in ("qzeros", "scales", "g_idx") else 1
    if method == "bitsandbytes":
        tables = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
        if ".quant_state." in name or name.endswith(tables):
            return 0
        return 2 if tensor.dtype == "U8" and f"{name}.absmax" in tensors else 1
    if method == "mlx":
        if last in ("scales", "biases") and f"{stem}.weight" in tensors and f"{stem}.scales" in tensors:
            return 0
        own = config["quantization"].get(stem)  # a layer may have a width of its own
        width = own["bits"] if isinstance(own, dict) and "bits" in own else bits or 4
        return 32 / width if tensor.dtype == "U32" and f"{stem}.scales" in tensors else 1
    if last == "weight_packed":  # compressed-tensors
        return 32 / (bits or 4)
    helpers = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale")
    return 0 if last in helpers else 1
