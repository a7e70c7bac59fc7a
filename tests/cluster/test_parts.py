"""The parts of the cluster that need no Ray."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import warnings
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from sakuradite.cluster import deploy, local, model, router
from sakuradite.cluster.journal import MAX_COMPLETED, CatalogState, History, Journal, ModelRecord
from sakuradite.cluster.lifecycle import Lifecycle, application_name, differences
from sakuradite.cluster.table import Entry, Table
from sakuradite.cluster.watcher import users_of
from sakuradite.config import ModelConfig
from sakuradite.errors import (
    ConfigurationError,
    InsufficientStorageError,
    ModelLoadingError,
    ModelNotFoundError,
    NotFoundError,
)
from sakuradite.http.gateway import ResidentModel
from sakuradite.operations import ModelCapabilities, Operation

ROOT = Path(__file__).parents[2]
CAPABILITIES = ModelCapabilities(
    architecture="Fake", backend="torch", device="cuda:0", dtype="bfloat16",
    context_length=8, max_input_tokens=8, max_questions=8,
)  # fmt: skip


def test_replicas_tell_all_warnings_and_where_they_differ() -> None:
    low = CAPABILITIES.model_copy(update={"warnings": ("low label mass", "alone on CUDA")})
    wide = low.model_copy(update={"dtype": "float32", "warnings": ("low label mass", "little memory")})
    assert deploy.together([low, low]) == low
    assert deploy.together([low, wide]) == low.model_copy(
        update={
            "warnings": (
                "low label mass",
                "alone on CUDA",
                "little memory",
                "the replicas differ in dtype: bfloat16, float32",
            )
        }
    )


def config(**fields: object) -> ModelConfig:
    return ModelConfig.model_validate({"model": "m", **fields})


@pytest.mark.parametrize(
    ("asked", "different"),
    [
        ({}, []),
        ({"device": "cuda"}, []),
        ({"device": "cuda:0", "backend": "torch", "dtype": "bfloat16", "revision": "abc"}, []),
        ({"offline": True}, []),
        ({"device": "cpu"}, ["device"]),
        ({"dtype": "float32", "max_batch_size": 3}, ["dtype", "max_batch_size"]),
        ({"revision": "other"}, ["revision"]),
    ],
)
def test_auto_matches_what_is_resident(asked: dict[str, object], different: list[str]) -> None:
    operation = Operation(id="o", kind="load", model="m")
    record = ModelRecord(
        config=config(), state="ready", application="a", operation=operation, revision="abc", capabilities=CAPABILITIES
    )
    assert differences(config(**asked), record) == different


def test_serve_is_not_looked_at_while_an_application_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that made configurations of Serve's at once ended one load in some twenty with an internal error."""
    looking, looked = threading.Event(), threading.Event()

    def status() -> Any:
        looked.set()
        return SimpleNamespace(applications={})

    def look() -> None:
        looking.set()
        deploy.status()

    def build() -> Any:
        thread.start()
        assert looking.wait(60)
        assert not looked.wait(0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own modules
        monkeypatch.setattr("ray.serve.status", status)
        monkeypatch.setattr("ray.serve.run_many", lambda *_, **__: None)
    thread = threading.Thread(target=look)
    deploy.submit("a", build)
    thread.join(60)
    assert looked.is_set()


def test_application_names_tell_loads_apart() -> None:
    names = {application_name(m, f"op_{i:024x}") for i in range(2) for m in ("a/b", "/x/ä ö?u=1")}
    assert len(names) == 4
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-") for name in names)


def test_the_table_resolves_ids_aliases_and_the_default() -> None:
    def entry(name: str, state: str) -> Entry:
        resident = ResidentModel(name, 0, CAPABILITIES) if state == "ready" else None
        return Entry(state, f"app-{name}", 1.0, "wait", resident)  # type: ignore[arg-type]

    table = Table(1, {n: entry(n, s) for n, s in (("a", "loading"), ("b", "ready"), ("c", "ready"))}, {"x": "c"})
    assert [table.resolve(n).id for n in ("b", "x", "default", "jev-latest", "jev-preview")] == [
        "b",
        "c",
        "b",
        "b",
        "b",
    ]
    assert [m.id for m in table.ready()] == ["b", "c"]
    with pytest.raises(ModelLoadingError) as loading:
        table.resolve("a")
    assert loading.value.retry_after
    for name in ("nobody", ""):
        with pytest.raises(ModelNotFoundError):
            table.resolve(name)
    assert Table(1, table.entries, {}, "c").resolve("jev-latest").id == "c"
    assert Table(1, table.entries, {"default": "b"}, "c").resolve("default").id == "b"
    with pytest.raises(ModelNotFoundError):
        Table().resolve("default")


def test_the_journal_is_owner_only_whole_and_says_when_damaged(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "home")
    assert journal.read() == (CatalogState(), History())
    state = CatalogState(session="s", aliases={"a": "b"})
    journal.write_state(state)
    journal.write_state(state)
    assert journal.read()[0] == state
    files = list((tmp_path / "home" / "catalog").iterdir())
    assert [f.name for f in files] == ["catalog.json"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    files[0].write_text('{"session": ')
    with pytest.raises(ConfigurationError, match=r"catalog\.json"):
        journal.read()


async def test_the_latest_completed_operations_are_kept(tmp_path: Path) -> None:
    async def published() -> None:
        return None

    life = Lifecycle(Journal(tmp_path), tmp_path, "s", 1.0, lambda: None, published)
    active = life._new("load", "still loading")
    ended = [life._new("pull", f"m{i}").id for i in range(MAX_COMPLETED + 3)]
    for id_ in ended:
        life._finish(id_, "succeeded")
    assert len(life.operations) == MAX_COMPLETED + 1
    assert life.operation(active.id).status == "pending"
    assert life.operation(ended[3]).status == "succeeded"
    for id_ in (*ended[:3], "op_nothing"):
        with pytest.raises(NotFoundError):
            life.operation(id_)
    again = Lifecycle(Journal(tmp_path), tmp_path, "another session", 1.0, lambda: None, published)
    cut = again.operation(active.id)
    assert cut.error is not None
    assert (cut.status, cut.error.code) == ("failed", "interrupted")


class FullDisk(Journal):
    """A home whose disk can be filled."""

    full = False

    def _write(self, name: str, content: BaseModel) -> None:
        if self.full:
            raise InsufficientStorageError("the daemon cannot write: No space left on device")
        super()._write(name, content)


async def test_a_full_disk_refuses_what_is_new_and_ends_nothing(tmp_path: Path) -> None:
    async def published() -> None:
        return None

    disk = FullDisk(tmp_path)
    life = Lifecycle(disk, tmp_path, "s", 1.0, lambda: None, published)
    life.set_alias("a", "m")
    ended = life._new("pull", "m")
    disk.full = True
    for attempt in (
        lambda: life.load(config()),
        lambda: life.pull("n", None, False),
        lambda: life.set_alias("b", "m"),
        lambda: life.set_alias("a", None),
    ):
        with pytest.raises(InsufficientStorageError):
            attempt()
    assert (life.state.aliases, life.models, list(life.operations)) == ({"a": "m"}, {}, [ended.id])
    life._finish(ended.id, "succeeded")
    life.models["m"] = ModelRecord(config=config(), state="failed", application="x", operation=ended)
    await life.unload("m")
    disk.full = False
    life.set_alias("b", "m")
    life._new("pull", "k")
    state, history = disk.read()
    assert (state.models, state.aliases) == ({}, {"a": "m", "b": "m"})
    assert [o.status for o in history.operations] == ["succeeded", "pending"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_the_journal_says_that_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    state = CatalogState(session="s")
    journal.write_state(state)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InsufficientStorageError, match=r"catalog\.json: No space left on device"):
        journal.write_state(CatalogState(session="t"))
    monkeypatch.undo()
    assert journal.read()[0] == state
    journal.check()


def test_a_place_too_deep_for_sockets_is_refused_with_limit_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp/" + "d" * 60)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigurationError, match=r"at most 24 bytes.*has 65.*TMPDIR"):
        local._short_temporary_directory()


@pytest.mark.parametrize("place", ["/tmp/" + "d" * 20, "/tmp/" + "ü" * 10])
def test_a_place_too_deep_gives_way_to_a_short_one(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: place)
    monkeypatch.setattr("os.access", lambda *_: True)
    assert local.short_place() == "/tmp"


@pytest.mark.parametrize(("free", "size"), [(64 << 20, 78 << 20), (300 << 20, 150 << 20), (8 << 30, 200 << 20)])
def test_the_object_store_fits_a_containers_shared_memory(
    free: int, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=free))
    assert local._object_store_bytes() == size
    assert ["67 MB free and Ray wants 81" in message for message in caplog.messages] == [True] * (free < size)


@pytest.mark.parametrize(
    ("explicit", "num_cpus", "threads"),
    [(None, 3.0, "3"), (None, 0.5, "1"), ("7", 3.0, "7"), (None, None, str(len(os.sched_getaffinity(0))))],
)
def test_threads_of_a_model(
    explicit: str | None, num_cpus: float | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_parent_environment", lambda name: explicit)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray has set it
    model.set_threads(num_cpus)
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_the_http_server_leaves_the_log_handlers_of_serve_alone() -> None:
    """Serve's replica names its handler's file to a new controller; one that cannot is replaced."""
    target = logging.NullHandler()
    handler = MemoryHandler(1, target=target)
    router._server(None, 1.0)
    assert handler.target is target
    handler.close()


def test_the_watcher_sees_who_uses_a_folder(tmp_path: Path) -> None:
    assert users_of(str(tmp_path)) == []
