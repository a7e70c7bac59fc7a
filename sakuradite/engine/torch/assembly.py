"""Putting a backend together: device, dtype, weights, and a layout that a configuration allows and a probe confirms."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sakuradite.config import ModelConfig
from sakuradite.engine.backend import ModelFacts
from sakuradite.engine.torch import compiled, decoder, fused, layers, linear, loading, memory, probe
from sakuradite.engine.torch.backend import LayoutScorer, TorchBackend
from sakuradite.engine.torch.cloned import Cloned
from sakuradite.engine.torch.device import gains_by_bfloat16, pick_device, pick_dtype, set_threads
from sakuradite.engine.torch.eligibility import Decision, decide
from sakuradite.engine.torch.forward import Caller
from sakuradite.engine.torch.images import Illustrated, set_attention
from sakuradite.engine.torch.packed import Bounds, Packed
from sakuradite.engine.torch.padded import Padded
from sakuradite.engine.torch.rotary import Rotary
from sakuradite.errors import ConfigurationError, ModelLoadFailedError

logger = logging.getLogger(__name__)


def assemble(config: ModelConfig, checkpoint: Path) -> TorchBackend:
    """See `sakuradite.engine.torch.load`."""
    device = pick_device(config.device)
    if config.compile:
        compiled.check(device)
    described = loading.read_config(checkpoint)
    loading.check_supported(described, device)
    stored = loading.quantization(described)
    files = loading.weight_file_bytes(checkpoint) * (1 if stored is None else 4)  # of 16 bits; quantised to 4, at most
    dtype = pick_dtype(config.dtype, loading.stored_dtype(described), device, files)
    if device.type == "cpu":
        set_threads(config)
        memory.keep_heap()
    model = loading.load_model(checkpoint, described, device, dtype)
    parameters = sum(p.numel() for p in model.parameters())
    packed = loading.quantization(model.config)
    if linear.available(device, dtype) and packed is None:
        linear.pack(model)
        fused.fuse(model)
        memory.trim_heap()
    text = model.config.get_text_config()
    parts = Parts(model, text, device, dtype, config)
    if config.compile and loading.reads_images(described):
        raise ConfigurationError("compile=True is for models of text alone; load without it", param="compile")
    pictured = make_illustrated(parts) if loading.reads_images(described) else None
    decision, scorer = choose(parts)
    warnings: tuple[str, ...] = () if pictured is None else pictured.warnings
    if stored and not packed:
        warnings += (
            f"the weights are stored as {stored}, which Transformers cannot compute with on {device}: it unpacked them "
            f"to {str(dtype).removeprefix('torch.')}, {memory.weight_bytes(model) / 2**30:.2f} GiB",
        )
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not gains_by_bfloat16()
    if config.dtype == "auto" and slow and packed is None:
        warnings += (
            "the weights stay in bfloat16, which this CPU computes more slowly than float32, because their "
            f"{4 * parameters / 2**30:.1f} GiB in float32 did not fit in the memory that was free",
        )
    if config.compile and decision.layout == "packed":
        compiled.warm_up(scorer, device, pass_tokens(parts))
    elif config.compile:
        warnings += (
            f"compile=True changes nothing: it is for the packed layout, and this model's is {decision.layout}",
        )
    facts = ModelFacts(
        architecture=type(model).__name__,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        context_length=loading.context_length(described),
        vocabulary_size=text.vocab_size,
        parameters=parameters,
        weight_bytes=memory.weight_bytes(model),
        layout=decision.layout,
        layout_reason=decision.reason,
        modalities=("text",) if pictured is None else ("text", "image"),
        warnings=warnings,
    )
    round_up = compiled.bucket if config.compile and decision.layout == "packed" else int
    budget = memory.Budget(memory.sizes(text, dtype), pass_tokens(parts), round_up)
    return TorchBackend(model, facts, scorer, budget, pictured)


@dataclass(frozen=True)
class Parts:
    """What layouts are made of."""

    model: Any
    text: Any
    device: torch.device
    dtype: torch.dtype
    config: ModelConfig


def choose(parts: Parts) -> tuple[Decision, LayoutScorer]:
    """The layout that the configuration allows, or the plain one where the probe says no."""
    decision = decide(parts.text, parts.dtype, bool(getattr(parts.model, "_supports_attention_backend", False)))
    plain = make_padded(parts)
    if decision.layout == "padded":
        return decision, plain
    native = parts.text._attn_implementation
    vocabulary = parts.text.vocab_size
    expected = probe.plain_answers(plain, vocabulary)
    try:
        scorer = make_packed(parts) if decision.layout == "packed" else make_cloned(parts, plain)
        difference = probe.disagreement(probe.reuse_answers(scorer, vocabulary), expected)
        problem = f"probabilities differed by {difference:.3g}"
    except Exception as error:
        if parts.config.compile:
            raise ModelLoadFailedError(
                f"compile=True failed ({type(error).__name__}: {error}); load without it"
            ) from error
        logger.warning("the %s layout failed its probe", decision.layout, exc_info=True)
        difference, problem = float("inf"), f"it raised {type(error).__name__}"
    if difference <= probe.TOLERANCE[parts.dtype]:
        return decision, scorer
    decoder.restore(parts.model)
    set_attention(parts.model, native)
    reason = f"{decision.reason}, but a probe of the {decision.layout} layout disagreed with a full forward: {problem}"
    return Decision("padded", reason), plain


def make_padded(parts: Parts) -> Padded:
    sizes = memory.sizes(parts.text, parts.dtype)
    return Padded(
        Caller(parts.model),
        Rotary(parts.text),
        parts.device,
        _pad(parts.text),
        pass_tokens=pass_tokens(parts),
        pass_reads=sizes.pass_reads(),
    )


def make_illustrated(parts: Parts) -> Illustrated | None:
    """The layout of rows with images, made before another one replaces the model's attention."""
    if not isinstance(getattr(parts.model.config, "image_token_id", None), int):
        return None
    return Illustrated(
        parts.model,
        Rotary(parts.text),
        parts.device,
        _pad(parts.text),
        native=parts.text._attn_implementation,
        pass_tokens=pass_tokens(parts),
        pass_reads=memory.sizes(parts.text, parts.dtype).pass_reads(),
    )


def make_cloned(parts: Parts, plain: Padded) -> Cloned:
    sizes = memory.sizes(parts.text, parts.dtype)
    return Cloned(
        Caller(parts.model),
        parts.device,
        plain,
        _pad(parts.text),
        pass_tokens=pass_tokens(parts),
        cache_tokens=_cache_bytes(parts) // sizes.cache_bytes_per_token,
    )


def fusible(parts: Parts) -> bool:
    """Whether decoder layers may be replaced: not where they are compiled, or see images by another attention."""
    return not parts.config.compile and not loading.reads_images(parts.model.config)


def make_packed(parts: Parts) -> Packed:
    """The packed layout. From here on the model's attention works only inside packed forwards."""
    sizes = memory.sizes(parts.text, parts.dtype)
    layers.register()
    set_attention(parts.model, layers.IMPLEMENTATION)
    if fusible(parts) and decoder.fuse_layers(parts.model):
        memory.trim_heap()
    bounds = Bounds(
        pass_tokens=pass_tokens(parts),
        pass_reads=sizes.pass_reads(),
        cache_bytes=_cache_bytes(parts),
        cache_bytes_per_token=sizes.cache_bytes_per_token,
    )
    rotary = Rotary(parts.text)
    if parts.config.compile:
        caller = compiled.CompiledCaller(parts.model, parts.device)
        return Packed(caller, rotary, parts.device, bounds, compiled.bucket)
    return Packed(Caller(parts.model), rotary, parts.device, bounds)


def pass_tokens(parts: Parts) -> int:
    """Tokens of one forward. `max_batch_tokens` bounds it; on a CPU longer ones gain nothing."""
    tokens = parts.config.max_batch_tokens
    return min(tokens, memory.CPU_PASS_TOKENS) if parts.device.type == "cpu" else tokens


def _cache_bytes(parts: Parts) -> int:
    """Bytes that prefixes may hold between batches."""
    if parts.config.max_cache_bytes is not None:
        return parts.config.max_cache_bytes
    return int(memory.CACHE_SHARE * memory.free_bytes(parts.device))


def _pad(config: Any) -> int:
    """A token to pad with; masked, so any will do: the padding token, or the end of sequence where there is none."""
    for value in (config.pad_token_id, config.eos_token_id):
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int) and 0 <= value < config.vocab_size:
            return value
    return 0
