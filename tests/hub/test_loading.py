"""From the hub to an answer: real checkpoints, pulled from the stand-in and loaded by the engine on PyTorch."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.inspect import inspect
from sakuradite.hub.resolve import resolve
from sakuradite.hub.store import Store
from sakuradite.questions import Choice, question_record
from sakuradite.records import RequestRecord, RowAnswer
from tests.hub.standin import StandIn

MODEL = "org/tiny"
REQUEST = RequestRecord(
    "r", ("the customer was charged twice",), (question_record(Choice(criteria={"yes": None, "no": None})),)
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def answer(path: Path) -> tuple[float, ...]:
    engine = Engine(ModelConfig(model=MODEL, backend="torch", device="cpu", dtype="float32"), path)
    await engine.start()
    try:
        (outcome,) = [outcome async for group in engine.decide(REQUEST) for outcome in group]
    finally:
        await engine.stop(0.0)
    assert isinstance(outcome, RowAnswer)
    return outcome.probabilities


def split(folder: Path, files: dict[str, bytes], scratch: Path) -> dict[str, bytes]:
    """The same checkpoint with its weights in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, scratch / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in parts.items() for key in keys}}
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    shards = {file: (scratch / file).read_bytes() for file in parts}
    return rest | shards | {"model.safetensors.index.json": json.dumps(index).encode()}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
async def test_a_pulled_checkpoint_answers_as_the_folder_that_it_came_from(
    tiny: Callable[..., Path], home: Path, store: Store, standin: StandIn, tmp_path: Path, sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tiny("llama")
    files = files_of(folder)
    standin.add(MODEL, split(folder, files, tmp_path) if sharded else files | {"pytorch_model.bin": b"never read"})
    store.pull(MODEL)

    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"loading a stored model connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    found = resolve(MODEL, home=home)
    assert await answer(found.path) == pytest.approx(await answer(folder), abs=1e-6)


async def test_code_beside_a_native_checkpoint_is_neither_stored_nor_run(
    tiny: Callable[..., Path], home: Path, store: Store, standin: StandIn
) -> None:
    files = files_of(tiny("llama"))
    config = json.loads(files["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    trap = b"raise SystemExit('code of a repository was run')"
    standin.add(MODEL, files | {"config.json": json.dumps(config).encode(), "modeling_own.py": trap})
    found = store.pull(MODEL)
    assert not list(found.path.rglob("*.py"))
    assert len(await answer(found.path)) == 2


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_checkpoint_that_only_its_own_code_could_load(
    tiny: Callable[..., Path], home: Path, store: Store, standin: StandIn, tmp_path: Path, where: str
) -> None:
    files = files_of(tiny("llama"))
    config = json.loads(files["config.json"]) | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    files |= {"config.json": json.dumps(config).encode(), "own.py": b"raise SystemExit('code was run')"}
    standin.add(MODEL, files)
    folder = tmp_path / "own"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    model = MODEL if where == "hub" else str(folder)
    with pytest.raises(UnsupportedModelError, match="custom code is not run"):
        resolve(model, home=home, store=store)
    reasons = {backend.reason for backend in inspect(model, home=home, hub=store.hub).backends.values()}
    assert all("custom code is not run" in (reason or "") for reason in reasons)


async def test_settings_of_a_wrong_type_are_refused_by_the_engine_too(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, data in files_of(tiny("llama")).items():
        (folder / name).write_bytes(data)
    config = json.loads((folder / "config.json").read_bytes()) | {"hidden_size": "many"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"config\.json is not understood by this Transformers"):
        await answer(folder)
    assert "does not understand its config.json" in (inspect(str(folder), home=tmp_path).backends["torch"].reason or "")
