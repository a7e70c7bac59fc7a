"""Settings for mlx-lm: what is repaired, what is refused and with which reason. Needs Transformers, not MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sakuradite.engine.mlx.families import FAMILIES, REFUSED
from sakuradite.engine.mlx.translation import translate
from sakuradite.errors import ModelLoadFailedError, UnsupportedModelError

DOCS = Path(__file__).parents[3] / "docs" / "mlx.md"
LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4}


def folder(tmp_path: Path, settings: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Rotary settings as Transformers 5 saves them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | more}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({}, 1e4, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, "linear"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}, 5e5, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5} | YARN}, 5e5, "yarn"),
    ],
)
def test_rotary_settings_of_every_version_reach_mlx_lm(
    tmp_path: Path, settings: dict[str, Any], theta: float, scaling: str | None
) -> None:
    found = translate(folder(tmp_path, LLAMA | settings)).settings
    assert found["rope_theta"] == theta
    if scaling is None:
        assert found["rope_scaling"] is None
    else:
        assert found["rope_scaling"]["type"] == scaling
        assert found["rope_scaling"]["factor"] in (2.0, 4.0)


def test_local_and_global_rotary_settings_of_gemma3_reach_mlx_lm(tmp_path: Path) -> None:
    nested = {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 2e4}}
    found = translate(folder(tmp_path, {"model_type": "gemma3_text", "rope_parameters": nested})).settings
    assert (found["rope_theta"], found["rope_local_base_freq"], found["sliding_window_pattern"]) == (3e6, 2e4, 6)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bamba"}, "bamba is refused on MLX: mlx-lm has no implementation"),
    ({"model_type": "arcee"}, "arcee is refused on MLX: it has not been compared with PyTorch; use backend torch"),
    ({"model_type": "hunyuan_v1_dense"} | rope("dynamic", factor=2.0), "dynamic without alpha"),
    ({"model_type": "gemma", "hidden_act": "relu"}, "hidden_act relu of this gemma .* computes gelu_pytorch_tanh"),
    (LLAMA | rope("dynamic", factor=2.0), r"\(dynamic\) is refused on MLX"),
    (LLAMA | rope("yarn", truncate=False, **YARN), r"truncate: false"),
    (LLAMA | rope("yarn", attention_factor=2.0, **YARN), r"attention_factor 2\.0"),
    (LLAMA | rope("default", partial_rotary_factor=0.5), r"partial_rotary_factor 0\.5"),
    ({"model_type": "mixtral", "sliding_window": None} | rope("yarn", **YARN), r"mixtral \(yarn\) is refused"),
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act gelu of this llama is refused on MLX: mlx-lm computes silu"),
    (LLAMA | {"model_file": "model.py"}, "asks to run its own code"),
    (LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, "packed as mxfp4 .* native CUDA kernels only"),
    (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "packed as awq are refused on MLX"),
    (
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "cannot lay out this order of layers",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSALS)
def test_what_mlx_lm_would_misread_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        translate(folder(tmp_path, settings))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_a_refused_family_says_why(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        translate(folder(tmp_path, {"model_type": model_type}))
    assert str(caught.value) == f"{model_type} is refused on MLX: {REFUSED[model_type]}; use backend torch"


@pytest.mark.parametrize(
    ("settings", "context", "warned"),
    [
        (LLAMA | {"max_position_embeddings": 4096}, 4096, False),
        ({"model_type": "gemma2", "max_position_embeddings": 8192, "sliding_window": 4096}, 4096, True),
        ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}, 4096, True),
        ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None}, 32768, False),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64}, 32768, False),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            64,
            True,
        ),
        ({"model_type": "gemma3_text", "max_position_embeddings": 32768, "sliding_window": 512}, 32768, False),
        (
            {
                "model_type": "phi3",
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            },
            4096,
            True,
        ),
        ({"model_type": "mamba2"}, None, False),
    ],
)
def test_the_context_ends_where_mlx_lm_stops_agreeing(
    tmp_path: Path, settings: dict[str, Any], context: int | None, warned: bool
) -> None:
    found = translate(folder(tmp_path, settings))
    assert found.context_length == context
    assert bool(found.warnings) == warned
    assert all(f"inputs end at {context} tokens on MLX" in warning for warning in found.warnings)


def test_packed_weights_of_mlx_are_no_reason_to_refuse(tmp_path: Path) -> None:
    own = {"group_size": 64, "bits": 4}
    found = translate(folder(tmp_path, LLAMA | {"quantization": own, "quantization_config": own}))
    assert found.settings["quantization"] == own


@pytest.mark.parametrize("text", ["", "{", "[]", '{"architectures": []}'])
def test_settings_that_cannot_be_read_fail_the_load(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadFailedError, match=r"config\.json"):
        translate(tmp_path)


def test_the_docs_list_what_is_accepted_and_what_is_refused_as_the_code_does() -> None:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    accepted = [f"| `{name}` | {', '.join(sorted(family.rotary))} |" for name, family in sorted(FAMILIES.items())]
    refused = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    assert [" | ".join(line.split(" | ")[:2]) + " |" for line in lines[: len(accepted)]] == accepted
    assert lines[len(accepted) :] == refused


def test_the_docs_say_which_families_are_mended() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    said = {line.split("`")[1] for line in lines if line.startswith("| `") and "mended" in line}
    assert said == {name for name, family in FAMILIES.items() if family.mended}
