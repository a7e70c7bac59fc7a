"""A real model on MLX's CPU build, compared with PyTorch. OpenBLAS is preloaded where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sakuradite.hub import smollm2
from tests.engine.mlx.tiny import Reference, tokens

pytest.importorskip("mlx.core", reason="needs the extra [mlx]")

OPENBLAS = sorted(Path("/usr/lib").glob("*/openblas-pthread/libblas.so.3"))  # Debian's libopenblas0-pthread
SCORE = """
import json, sys
from pathlib import Path
from sakuradite.config import ModelConfig
from sakuradite.engine.backend import Group, Prefix, Read, Row
from sakuradite.engine.mlx import load
folder, wanted = Path(sys.argv[1]), json.load(sys.stdin)
backend = load(ModelConfig(model="smollm2", backend="mlx", device="cpu", dtype="float32"), folder)
everything = tuple(range(backend.facts.vocabulary_size))
rows = [Row(tuple(suffix), (Read(len(suffix) - 1, everything),)) for suffix in wanted[1]]
(found,) = backend.score([Group(Prefix(tuple(wanted[0])), rows)])
json.dump([scores[0].tolist() for scores in found], sys.stdout)
"""


@pytest.mark.slow
def test_smollm2_answers_as_on_pytorch(tmp_path: Path) -> None:
    folder = smollm2.checkpoint(Path(os.environ.get("SAKURADITE_HOME") or tmp_path))
    state, suffixes = tokens(140, seed=1), [tokens(9, seed=2), tokens(23, seed=3)]
    done = subprocess.run(
        [sys.executable, "-c", SCORE, str(folder)],
        input=json.dumps([state, suffixes]),
        env=os.environ | ({"LD_PRELOAD": str(OPENBLAS[0])} if OPENBLAS else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    reference = Reference(folder)
    for suffix, logs in zip(suffixes, json.loads(done.stdout), strict=True):
        assert np.abs(np.exp(logs) - reference.probabilities(state + suffix)[-1]).max() < 1e-4
