"""Bytes that are predicted for images, held against what tensors take, and a batch that would not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sakuradite.engine.backend import Group, Images, OutOfDeviceMemory, Prefix, Read, Row
from sakuradite.engine.torch import memory
from tests.engine.torch.peak import peak_bytes
from tests.engine.torch.prompts import loaded, probabilities
from tests.picturing import build_pictured

SIDE = 64  # patches along an image
LARGE = {"image_size": 7 * SIDE, "patch_size": 7}


def prepared(architecture: str, count: int, full: bool) -> tuple[dict[str, NDArray[Any]], int]:
    """Arrays of `count` images as large as the tower sees them, and the tokens they take. Not full: padded by half."""
    draw = np.random.default_rng(0)

    def noise(*shape: int) -> NDArray[np.float32]:
        return draw.normal(size=shape).astype(np.float32)

    patches, high = SIDE * SIDE, SIDE if full else SIDE // 2
    arrays: dict[str, NDArray[Any]]
    match architecture:
        case "smolvlm":
            mask = np.zeros((1, count, 7 * SIDE, 7 * SIDE), np.int64)
            mask[:, :, : 7 * high] = 1
            arrays = {"pixel_values": noise(1, count, 3, 7 * SIDE, 7 * SIDE), "pixel_attention_mask": mask}
            return arrays, count * patches // 4
        case "lfm2_vl":
            mask = np.zeros((count, patches), np.int64)
            mask[:, : high * SIDE] = 1
            shapes = np.array([[high, SIDE]] * count)
            arrays = {"pixel_values": noise(count, patches, 48), "pixel_attention_mask": mask, "spatial_shapes": shapes}
            return arrays, count * high * SIDE // 4
        case "qwen3_vl":
            grid = np.array([[1, high, SIDE]] * count)
            arrays = {"pixel_values": noise(count * high * SIDE, 96), "image_grid_thw": grid}
            return arrays, count * high * SIDE // 4
    return {"pixel_values": noise(count, 3, 7 * SIDE, 7 * SIDE)}, count * patches // 4


def asked(architecture: str, token: int, images: int, sets: int, full: bool) -> list[Group]:
    groups = []
    for _ in range(sets):
        arrays, count = prepared(architecture, images, full)
        one = (token,) * (count // images)
        suffix = (5, *(*one, 6) * images, 7)
        row = Row(suffix, (Read(len(suffix) - 1, (1, 2)),))
        groups.append(Group(Prefix((), extras={"images": Images(arrays)}), [row]))
    return groups


@pytest.mark.parametrize(
    ("architecture", "dtype", "images", "sets", "full"),
    [
        ("smolvlm", "float32", 1, 2, True),
        ("smolvlm", "bfloat16", 3, 1, False),
        ("lfm2_vl", "float32", 2, 4, False),
        ("qwen3_vl", "float32", 2, 3, True),
        ("gemma3", "float32", 2, 1, True),
        ("gemma3", "bfloat16", 3, 1, True),
    ],
)
def test_looking_takes_no_more_than_was_predicted(
    architecture: str, dtype: str, images: int, sets: int, full: bool, tmp_path: Path
) -> None:
    """The first time, and the second, when the tower has seen them; without the images it would be too little."""
    size = LARGE if architecture in ("smolvlm", "gemma3") else {}
    folder = build_pictured(architecture, tmp_path, vision=size, tokens_per_image=SIDE * SIDE // 4)
    backend = loaded(folder, dtype)
    illustrated: Any = backend._illustrated
    groups = asked(architecture, illustrated._image_token, images, sets, full)
    rows = [(group.prefix, row) for group in groups for row in group.rows]
    predicted, images_alone = backend.predicted_bytes(rows), illustrated.extra_bytes(rows)
    taken = peak_bytes(lambda: probabilities(backend, *groups))
    assert predicted - images_alone < taken <= predicted
    again = backend.predicted_bytes(rows)
    assert again < predicted
    assert peak_bytes(lambda: probabilities(backend, *groups)) <= again


def test_images_that_do_not_fit_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded(build_pictured("smolvlm", tmp_path, vision=LARGE))
    (group,) = asked("smolvlm", backend._illustrated._image_token, 1, 1, True)  # type: ignore[union-attr]
    rows = [(group.prefix, row) for row in group.rows]
    monkeypatch.setattr(memory, "free_bytes", lambda _: backend.predicted_bytes(rows) - 1)
    with pytest.raises(OutOfDeviceMemory, match="free"):
        backend.score([group])
    assert group.prefix.extras["images"].features is None
    monkeypatch.undo()
    probabilities(backend, group)
