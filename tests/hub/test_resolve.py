"""From a word to a folder: paths, GGUF files, stored models, Hugging Face's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from sakuradite.errors import APIError, ModelNotFoundError, OfflineMissingError, UnsupportedModelError
from sakuradite.hub import gguf
from sakuradite.hub.inspect import inspect
from sakuradite.hub.resolve import resolve
from sakuradite.hub.store import Store
from sakuradite.operations import Progress
from tests.hub.conftest import checkpoint, sharded, write
from tests.hub.standin import StandIn

MODEL = "org/tiny"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of the test's own, so that relative paths mean something known."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "tiny", "./tiny", "../here/tiny"])
def test_a_local_folder(elsewhere: Path, home: Path, standin: StandIn, spelling: str) -> None:
    folder = write(elsewhere / "tiny", checkpoint())
    found = resolve(spelling.format(folder), home=home)
    assert (found.path.resolve(), found.revision, found.managed) == (folder, None, False)
    assert Path(found.model).is_absolute()
    assert found.created == int((folder / "config.json").stat().st_mtime)
    assert standin.seen == []
    assert not home.exists()


def test_a_folder_in_the_home_directory(elsewhere: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    folder = write(elsewhere / "tiny", checkpoint())
    assert resolve("~/tiny", home=home).path == folder


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(elsewhere: Path, home: Path, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    write(elsewhere / "org" / "tiny", checkpoint())
    assert not resolve(MODEL, home=home).managed
    assert standin.seen == []


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "./tinny", "../x/tiny", "~/tinny", "models/a/b", "tinny.gguf", "org/tinny/", "C:\\models\\x",
     "here-is/tinny"],
)  # fmt: skip
def test_a_misspelt_path_is_told_from_a_missing_model(
    elsewhere: Path, home: Path, standin: StandIn, model: str
) -> None:
    (elsewhere / "here-is").mkdir()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model, home=home)
    assert f"{model!r} looks like a path, and nothing is there" in caught.value.message
    assert str(elsewhere) in caught.value.message
    assert caught.value.status == 404
    assert standin.seen == []


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"README.md": b"x"}, "it has no weights"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "its weights are pickles"),
        ({name: data for name, data in sharded().items() if "00002" not in name}, "the checkpoint is incomplete"),
        (checkpoint(config={"model_type": "mystery", "auto_map": {"AutoConfig": "c.C"}}), "custom code is not run"),
        (checkpoint() | {"config.json": b"nonsense"}, "config.json is not JSON"),
    ],
)
def test_a_folder_that_is_no_checkpoint(elsewhere: Path, home: Path, files: dict[str, bytes], reason: str) -> None:
    folder = write(elsewhere / "tiny", files)
    with pytest.raises(UnsupportedModelError, match=f"{folder} is refused: .*{reason}"):
        resolve(str(folder), home=home)


def test_a_local_folder_has_no_revisions(elsewhere: Path, home: Path) -> None:
    write(elsewhere / "tiny", checkpoint())
    with pytest.raises(UnsupportedModelError, match="has no revisions"):
        resolve("./tiny", revision="main", home=home)


def test_a_file_that_is_not_gguf(elsewhere: Path, home: Path) -> None:
    (elsewhere / "weights.pt").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"is neither a checkpoint folder nor a \.gguf file"):
        resolve("weights.pt", home=home)


def test_a_gguf_file_is_converted_with_progress(elsewhere: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "q4.GGUF").write_bytes(b"x")
    calls: list[tuple[Path, Path]] = []
    seen: list[Progress] = []

    def to_checkpoint(path: Path, home: Path, progress: gguf.OnProgress) -> Path:
        calls.append((path, home))
        progress(Progress(phase="converting"))
        return home / "converted"

    monkeypatch.setattr(gguf, "to_checkpoint", to_checkpoint)
    found = resolve("q4.GGUF", home=home, progress=seen.append)
    assert calls == [(elsewhere / "q4.GGUF", home)]
    assert (found.model, found.path, found.managed) == (str(elsewhere / "q4.GGUF"), home / "converted", False)
    assert [p.phase for p in seen] == ["converting"]


def test_a_broken_gguf_file(elsewhere: Path, home: Path) -> None:
    (elsewhere / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(APIError, match=r"broken\.gguf is not a whole GGUF file"):
        resolve("broken.gguf", home=home)


def test_a_hub_model_is_downloaded_once_and_then_the_hub_is_not_asked(
    home: Path, standin: StandIn, store: Store
) -> None:
    commit = standin.add(MODEL, checkpoint())
    first = resolve(MODEL, home=home, store=store)
    assert (first.model, first.revision, first.managed) == (MODEL, commit, True)
    assert first.created == 1772366400
    standin.add(MODEL, checkpoint(weights=100))
    standin.seen.clear()
    assert resolve(MODEL, home=home, store=store) == first
    assert standin.seen == []
    assert store.pull(MODEL).revision != commit
    assert resolve(MODEL, home=home, store=store).revision != commit
    assert resolve(MODEL, revision=commit, home=home, store=store) == first


def hugging_face_cache(model: str, files: dict[str, bytes]) -> Path:
    """A snapshot as other programs leave it in the cache: links to blobs."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    write(root / "blobs", files)
    snapshot = root / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("c" * 40)
    return snapshot


def test_offline_a_snapshot_of_hugging_faces_cache_serves_where_it_lies(home: Path, standin: StandIn) -> None:
    snapshot = hugging_face_cache(MODEL, sharded())
    before = {path: path.lstat().st_mtime_ns for path in Path(constants.HF_HUB_CACHE).rglob("*")}
    found = resolve(MODEL, offline=True, home=home)
    assert (found.path, found.revision, found.managed) == (snapshot, "c" * 40, False)
    assert resolve(MODEL, revision="c" * 40, offline=True, home=home) == found
    pulled = Store(home).pull(MODEL, offline=True)
    assert (pulled.path, pulled.managed) == (snapshot, False)
    assert inspect(MODEL, offline=True, home=home).parameters == 60_000
    assert list(Store(home).list()) == []
    assert not home.exists()
    assert {path: path.lstat().st_mtime_ns for path in Path(constants.HF_HUB_CACHE).rglob("*")} == before
    assert standin.seen == []


@pytest.mark.parametrize("damage", ["a shard is missing", "a link leads out of the cache", "no weights"])
def test_an_incomplete_or_strange_snapshot_of_that_cache_is_not_taken(
    home: Path, standin: StandIn, tmp_path: Path, damage: str
) -> None:
    snapshot = hugging_face_cache(MODEL, sharded())
    shard = snapshot / "model-00002-of-00003.safetensors"
    if damage == "no weights":
        for link in snapshot.glob("model*"):
            link.unlink()
    else:
        shard.unlink()
    if damage == "a link leads out of the cache":
        (tmp_path / "outside").write_bytes(sharded()[shard.name])
        shard.symlink_to(tmp_path / "outside")
    with pytest.raises(OfflineMissingError):
        resolve(MODEL, offline=True, home=home)
