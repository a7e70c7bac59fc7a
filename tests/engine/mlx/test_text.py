"""The paths of the text backend: batches, forks, the plain path, native caches, limits, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sakuradite.engine.backend import Group, OutOfDeviceMemory, Prefix, Read, Row, RowScores
from sakuradite.engine.compile import Compiler
from sakuradite.engine.engine import Engine
from sakuradite.engine.mlx import load
from sakuradite.engine.mlx.body import Body
from sakuradite.engine.plan import Plan
from sakuradite.engine.readout import outcome
from sakuradite.engine.tokenizer import FastTokenizer
from sakuradite.errors import (
    ContextExceededError,
    InferenceFailedError,
    InsufficientResourcesError,
    ModelLoadFailedError,
    UnsupportedModelError,
)
from sakuradite.questions import Choice, Noul, question_record
from sakuradite.records import RequestRecord, RowAnswer
from tests.engine.mlx.tiny import SETTINGS, Reference, float32, row, tokens

mx = pytest.importorskip("mlx.core", reason="needs the extra [mlx]")

VOCABULARY = 439
STATE = tokens(150, seed=3)
type Tiny = Callable[..., Path]


def probabilities(scores: RowScores | Exception) -> NDArray[np.float32]:
    assert isinstance(scores, tuple), scores
    (logs,) = scores
    return np.exp(logs)


def only(backend: Any, prefix: tuple[int, ...], one: Row) -> NDArray[np.float32]:
    """The probabilities of a row that has a forward to itself."""
    group = Group(Prefix(prefix), [one])
    ((scores,),) = backend.score([group])
    backend.release(group.prefix)
    return probabilities(scores)


def save(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The checkpoint once more with other settings."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    change(settings)
    (target / "config.json").write_text(json.dumps(settings))
    return target


def test_a_checkpoint_saved_by_transformers_5_keeps_its_rotary_base(tiny: Tiny, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    full = tiny("llama", config={"rope_parameters": rope})

    def as_saved(settings: dict[str, Any]) -> None:
        del settings["rope_theta"], settings["partial_rotary_factor"]

    folder = save(full, tmp_path / "saved", as_saved)
    one = row(tokens(60), vocabulary=VOCABULARY)
    expected = Reference(folder).probabilities(one.suffix)[-1]
    assert np.abs(only(load(float32(folder), folder), (), one) - expected).max() < 1e-4
    from mlx_lm.utils import load_model

    theirs, _ = load_model(folder)  # what mlx-lm makes of it alone: this must differ, or the test proves nothing
    assert np.abs(np.array(mx.softmax(theirs(mx.array([one.suffix]))[0, -1])) - expected).max() > 0.01


def test_company_does_not_change_an_answer(tiny: Tiny) -> None:
    folder = tiny("qwen3")
    backend = load(float32(folder), folder)
    backend.set_head(STATE[:30])
    rows = [row(tokens(n, seed=n), vocabulary=VOCABULARY) for n in (5, 33, 90)]
    alone = [only(backend, STATE, one) for one in rows]
    short = [only(backend, STATE[:50], one) for one in rows]
    groups = [Group(Prefix(STATE), rows), Group(Prefix(STATE[:50]), rows), Group(Prefix(tokens(200)), rows[:1])]
    together = backend.score(groups)
    for found, expected in zip(together[0] + together[1], alone + short, strict=True):
        assert np.abs(probabilities(found) - expected).max() < 1e-5


def test_a_prefix_is_computed_once_and_gone_after_release(tiny: Tiny) -> None:
    folder = tiny("qwen3")
    backend: Any = load(float32(folder), folder)
    assert (backend.facts.layout, backend.facts.dtype) == ("cloned", "float32")
    prefix = Prefix(STATE)
    first = backend.score([Group(prefix, [row(tokens(9), vocabulary=VOCABULARY)])])
    kept = prefix.cache
    keys = [np.array(cache.keys) for cache in kept.caches]
    again = backend.score([Group(prefix, [row(tokens(9), vocabulary=VOCABULARY)] * 3)])
    assert prefix.cache is kept
    assert [np.array_equal(np.array(c.keys), k) for c, k in zip(kept.caches, keys, strict=True)]
    for found in again[0]:
        assert np.abs(probabilities(found) - probabilities(first[0][0])).max() < 1e-5
    backend.release(prefix)
    backend.release(prefix)  # twice is once
    assert (prefix.cache, backend._kept_tokens) == (None, 0)


def test_a_request_over_the_cache_budget_takes_the_plain_path(tiny: Tiny) -> None:
    folder = tiny("qwen3")
    one = row(tokens(9), vocabulary=VOCABULARY)
    roomy = only(load(float32(folder), folder), STATE, one)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
    config = float32(folder, max_cache_bytes=per_token * 149)
    backend: Any = load(config, folder)
    prefix = Prefix(STATE)
    ((scores,),) = backend.score([Group(prefix, [one])])
    assert prefix.cache is None
    assert np.abs(probabilities(scores) - roomy).max() < 1e-5
    fits: Any = load(float32(folder, max_cache_bytes=per_token * 150), folder)
    found = fits.score([Group(prefix, [one] * 5)])  # forks one row at a time: two would be over the budget
    assert prefix.cache is not None
    for scores in found[0]:
        assert np.abs(probabilities(scores) - roomy).max() < 1e-5


@pytest.mark.parametrize(
    ("architecture", "dtype", "reason"),
    [
        ("qwen3", "bfloat16", "bfloat16 weights keep the plain path"),
        ("qwen3", "float16", "float16 weights keep the plain path"),
        ("gemma3_text", "float32", "recurrent or rotating caches keep their native path"),
        ("falcon_h1", "float32", "recurrent or rotating caches keep their native path"),
    ],
)
def test_other_models_run_one_complete_row_at_a_time(tiny: Tiny, architecture: str, dtype: Any, reason: str) -> None:
    folder = tiny(architecture)
    backend = load(float32(folder, dtype=dtype), folder)
    assert (backend.facts.layout, backend.facts.dtype) == ("padded", dtype)
    assert reason in backend.facts.layout_reason
    rows = [row(tokens(n, seed=n), vocabulary=VOCABULARY) for n in (40, 7)]
    prefix = Prefix(STATE)
    (together,) = backend.score([Group(prefix, rows)])
    assert prefix.cache is None
    for one, found in zip(rows, together, strict=True):
        assert np.array_equal(probabilities(found), only(backend, STATE, one))


@pytest.mark.parametrize(
    ("architecture", "dtype", "config", "tolerance"),
    [
        ("qwen3", "bfloat16", None, 0.02),  # the head at one position and at all rounds differently
        ("qwen3", "float16", None, 0.005),
        ("llama", "bfloat16", None, 0.02),
        ("gemma3_text", "float32", {"sliding_window": 16}, 1e-5),  # rotating caches
        ("cohere2", "float32", SETTINGS["cohere2"], 1e-5),
        ("lfm2", "float32", {"tie_word_embeddings": True}, 1e-5),  # recurrent ones
        ("falcon_h1", "float32", None, 1e-5),
        ("mamba2", "float32", None, 1e-5),
        ("qwen3_next", "float32", None, 1e-5),
        ("nemotron_h", "float32", None, 1e-5),
    ],
)
def test_complete_rows_answer_as_a_plain_forward_of_mlx(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: Any,
    config: dict[str, Any] | None,
    tolerance: float,
) -> None:
    """R11.9: a short row in one forward, a long one in steps through its native caches, far behind any window."""
    from sakuradite.engine.mlx import text

    folder = tiny(architecture, config=config)
    backend: Any = load(float32(folder, dtype=dtype), folder)
    assert backend.facts.layout == "padded"
    rows = [row(tokens(n, seed=n), vocabulary=VOCABULARY) for n in (40, 7)]
    for step in (text.PREFILL_STEP, 48):
        monkeypatch.setattr(text, "PREFILL_STEP", step)
        (found,) = backend.score([Group(Prefix(STATE), rows)])
        for one, scores in zip(rows, found, strict=True):
            whole = backend._model(mx.array([STATE + one.suffix]))[0, -1].astype(mx.float32)
            assert np.abs(probabilities(scores) - np.array(mx.softmax(whole))).max() < tolerance


def test_half_precision_stays_near_float32(tiny: Tiny) -> None:
    folder = tiny("qwen3", dtype="bfloat16")
    one = row(tokens(60), vocabulary=VOCABULARY)
    backend = load(float32(folder, dtype="bfloat16"), folder)
    assert backend.facts.weight_bytes == 2 * backend.facts.parameters
    assert load(float32(folder, dtype="auto", device="cpu"), folder).facts.dtype == "float32"
    assert np.abs(only(backend, (), one) - Reference(folder).probabilities(one.suffix)[-1]).max() < 0.05


def test_packed_weights_answer_as_the_weights_they_stand_for(tiny: Tiny, tmp_path: Path) -> None:
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model
    from safetensors.numpy import load_file, save_file

    folder = tiny("llama")
    model, _ = load_model(folder)
    nn.quantize(model, group_size=32, bits=8)
    own = {"group_size": 32, "bits": 8}
    packed = save(folder, tmp_path / "packed", lambda s: s.update(quantization=own, quantization_config=own))
    mx.save_safetensors(str(packed / "model.safetensors"), dict(tree_flatten(model.parameters())))
    opened = save(folder, tmp_path / "opened", lambda _: None)
    weights = load_file(folder / "model.safetensors")
    for path, module in model.named_modules():
        if hasattr(module, "scales"):
            values = mx.dequantize(module.weight, module.scales, module.biases, **own)
            weights[f"{path}.weight"] = np.array(values)
    save_file(weights, opened / "model.safetensors", metadata={"format": "pt"})

    backend = load(float32(packed, dtype="auto"), packed)
    assert backend.facts.layout_reason == "packed weights keep the plain path, one row at a time"
    one = row(tokens(60), vocabulary=VOCABULARY)
    expected = Reference(opened).probabilities(one.suffix)[-1]
    assert np.abs(only(backend, STATE[:0], one) - expected).max() < 1e-4
    assert np.abs(Reference(folder).probabilities(one.suffix)[-1] - expected).max() > 1e-3  # packing did change it


def test_reads_at_several_positions_come_back_in_order(tiny: Tiny) -> None:
    folder = tiny("gpt2", config={"tie_word_embeddings": True})
    backend = load(float32(folder), folder)
    reference = Reference(folder)
    rows = [Row(tokens(20), (Read(3, (5, 9)), Read(19, (7,)))), Row(tokens(4), (Read(0, (1, 2, 3)),))]
    (found,) = backend.score([Group(Prefix(STATE), rows)])
    for one, scores in zip(rows, found, strict=True):
        expected = reference.probabilities(STATE + one.suffix)
        assert isinstance(scores, tuple)
        for read, logs in zip(one.reads, scores, strict=True):
            assert logs.dtype == np.float32
            assert np.allclose(np.exp(logs), expected[len(STATE) + read.offset, list(read.tokens)], atol=1e-4)


def test_a_row_that_cannot_be_scored_fails_alone(tiny: Tiny) -> None:
    folder = tiny("gemma2", config={"sliding_window": 64})
    backend = load(float32(folder), folder)
    assert backend.facts.context_length == 64
    assert "inputs end at 64 tokens on MLX" in backend.facts.warnings[0]
    good, long = row(tokens(40), vocabulary=VOCABULARY), row(tokens(65), vocabulary=VOCABULARY)
    (found,) = backend.score([Group(Prefix(()), [good, long, Row((5, VOCABULARY), (Read(0, (1,)),))])])
    assert np.abs(probabilities(found[0]) - Reference(folder).probabilities(good.suffix)[-1]).max() < 1e-4
    assert isinstance(found[1], ContextExceededError)
    assert "65 tokens is over the model's context of 64" in str(found[1])
    assert isinstance(found[2], InferenceFailedError)
    assert f"token {VOCABULARY} is outside" in str(found[2])


def test_a_batch_that_does_not_fit_is_told_apart(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("qwen3")
    backend: Any = load(float32(folder), folder)
    group = Group(Prefix(()), [row(tokens(5), vocabulary=VOCABULARY)])

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 70368744177664 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_forward", full)
        with pytest.raises(OutOfDeviceMemory):
            backend.score([group])
        patch.setattr(backend, "_forward", lambda *_: mx.eval(mx.zeros((2, 3)) @ mx.zeros((4, 5))))
        with pytest.raises(ValueError, match="matmul"):
            backend.score([group])
    probabilities(backend.score([group])[0][0])  # and works again


def test_long_inputs_fill_the_native_cache_in_steps(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from sakuradite.engine.mlx import text

    folder = tiny("qwen3_next")
    backend: Any = load(float32(folder), folder)
    lengths: list[int] = []
    whole = Body.__call__

    def counted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(inputs.shape[1])
        return whole(self, inputs, *args, **kwargs)

    monkeypatch.setattr(Body, "__call__", counted)
    monkeypatch.setattr(text, "PREFILL_STEP", 64)
    only(backend, STATE, row(tokens(20), vocabulary=VOCABULARY))
    assert lengths == [64, 64, 41, 1]
    lengths.clear()
    only(backend, (), row(tokens(60), vocabulary=VOCABULARY))
    assert lengths == [60]  # a short one in one forward, without a cache


def test_the_vocabulary_head_runs_at_the_positions_read(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("qwen3")
    backend: Any = load(float32(folder), folder)
    seen: list[int] = []
    head = backend._model.lm_head
    monkeypatch.setattr(type(head), "__call__", _counting(seen, head.weight.shape, type(head).__call__))
    rows = [row(tokens(n), vocabulary=VOCABULARY) for n in (30, 50)]
    backend.score([Group(Prefix(STATE), rows)])
    assert seen == [2]


def _counting(seen: list[int], shape: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Any, x: Any) -> Any:
        if self.weight.shape == shape:
            seen.append(x.shape[-2])
        return call(self, x)

    return counted


def test_weights_that_do_not_fit_the_settings_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    wrong = save(tiny("qwen3"), tmp_path / "wrong", lambda settings: settings.update(intermediate_size=96))
    with pytest.raises(UnsupportedModelError, match=r"MLX's qwen3 does not take this checkpoint \(Expected shape"):
        load(float32(wrong), wrong)
    (wrong / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailedError, match=r"no model\*\.safetensors"):
        load(float32(wrong), wrong)


def test_damaged_weights_fail_the_load(tiny: Tiny, tmp_path: Path) -> None:
    cut = save(tiny("qwen3"), tmp_path / "cut", lambda _: None)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelLoadFailedError, match="could not load the weights"):
        load(float32(cut), cut)


def test_untied_weights_that_mlx_lm_has_no_place_for_are_refused(tiny: Tiny) -> None:
    folder = tiny("lfm2")
    with pytest.raises(UnsupportedModelError, match=r"lfm2 does not take this checkpoint .*lm_head"):
        load(float32(folder), folder)


def test_no_gpu_here_is_said_before_anything_is_loaded(tiny: Tiny) -> None:
    folder = tiny("qwen3")
    if mx.metal.is_available():
        assert load(float32(folder, device="mps"), folder).facts.device == "metal"
    else:
        with pytest.raises(InsufficientResourcesError, match="needs an Apple GPU"):
            load(float32(folder, device="mps"), folder)


async def test_the_engine_answers_on_mlx_as_on_pytorch(tiny: Tiny) -> None:
    folder = tiny("qwen3")
    request = RequestRecord(
        "r",
        ("The parcel came two days late and the box was damaged. Nobody answered the telephone.",),
        (
            question_record(Noul(instructions="The parcel was late.")),
            question_record(Choice(criteria={"billing": "invoices", "shipping": None, "other": None})),
        ),
    )
    engine = Engine(float32(folder), folder)
    capabilities = await engine.start()
    assert (capabilities.backend, capabilities.dtype, capabilities.modalities) == ("mlx", "float32", ("text",))
    answers = [answer async for group in engine.decide(request) for answer in group]
    await engine.stop(drain=5)

    reference = Reference(folder)
    (plan,) = Compiler(FastTokenizer(folder), "m", 4096).compile([request])
    assert isinstance(plan, Plan)
    assert len(plan.questions) == len(answers) == 2
    for question, ours in zip(plan.questions, sorted(answers, key=lambda answer: answer.row), strict=True):
        prefix = question.prefix.tokens
        for number, one in enumerate(question.rows):
            (read,) = one.reads
            logs = np.log(reference.probabilities(prefix + one.suffix)[len(prefix) + read.offset])
            question.scores[number] = (logs[list(read.tokens)],)
        theirs = outcome(question)
        assert isinstance(ours, RowAnswer)
        assert isinstance(theirs, RowAnswer)
        assert ours.input_tokens == theirs.input_tokens
        assert np.allclose(ours.probabilities, theirs.probabilities, atol=1e-4)
        assert ours.label_mass == pytest.approx(theirs.label_mass, abs=1e-4)
