"""The store: pulling, resuming, sharing, listing, removing, and what may never happen to it."""

from __future__ import annotations

import os
import stat

import pytest

from sakuradite.hub.store import Store
from sakuradite.operations import Progress
from tests.hub.conftest import checkpoint, sharded
from tests.hub.standin import Fault, StandIn

MODEL = "org/tiny"


def test_pull_brings_what_a_load_needs_and_nothing_else(store: Store, standin: StandIn) -> None:
    files = checkpoint(
        pytorch_model__bin=b"x" * 5000, model__fp16__safetensors=b"y" * 5000, training_args__bin=b"z"
    ) | {"additional_chat_templates/tool.jinja": b"{{ tools }}", "original/model.pth": b"p" * 5000}
    commit = standin.add(MODEL, files)
    found = store.pull(MODEL)
    assert (found.model, found.revision, found.complete) == (MODEL, commit, True)
    assert found.path == store.root / "org--tiny" / commit
    there = {p.relative_to(found.path).as_posix(): p.read_bytes() for p in found.path.rglob("*") if p.is_file()}
    wanted = (
        "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors",
        "additional_chat_templates/tool.jinja",
    )  # fmt: skip
    assert there == {name: files[name] for name in wanted}
    assert found.released == 1772366400
    assert store.find(MODEL) == found
    assert list(store.list()) == [found]


def test_everything_belongs_to_its_owner_alone(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint() | {"additional_chat_templates/tool.jinja": b"{{ tools }}"})
    os.umask(mask := os.umask(0o022))
    assert mask is not None
    store.pull(MODEL)
    for path in (store.home, store.root, *store.root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_progress_counts_bytes_up_to_the_total(store: Store, standin: StandIn) -> None:
    files = sharded(weights=400_000)
    standin.add(MODEL, files)
    standin.delay = 0.02
    seen: list[Progress] = []
    store.pull(MODEL, progress=seen.append)
    assert [p.phase for p in seen if p.phase != "downloading"] == ["resolving", "done"]
    total = sum(len(data) for name, data in files.items() if not name.endswith((".md", ".py")))
    loading = [p for p in seen if p.phase == "downloading"]
    assert {p.bytes_total for p in loading} == {total}
    done = [p.bytes_done or 0 for p in loading]
    assert done == sorted(done)
    assert done[0] == 0
    assert any(0 < n < total for n in done)
    assert done[-1] == seen[-1].bytes_done == total


def test_a_second_pull_asks_for_the_commit_and_fetches_nothing(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    first = store.pull(MODEL)
    standin.seen.clear()
    assert store.pull(MODEL) == first
    assert [seen.path for seen in standin.seen] == [f"/api/models/{MODEL}/revision/main"]


def test_a_new_commit_shares_the_files_that_did_not_change(store: Store, standin: StandIn) -> None:
    old = standin.add(MODEL, checkpoint())
    before = store.pull(MODEL)
    new = standin.add(MODEL, checkpoint() | {"chat_template.jinja": b"{{ new }}"})
    standin.seen.clear()
    after = store.pull(MODEL)
    assert {s.path.rsplit("/", 1)[1] for s in standin.seen if "/resolve/" in s.path} == {
        "config.json",
        "chat_template.jinja",
    }
    assert (before.revision, after.revision) == (old, new)
    weights = [path.path / "model.safetensors" for path in (before, after)]
    assert weights[0].samefile(weights[1])
    assert (before.path / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    assert after.bytes < 2 * before.bytes
    assert [m.revision for m in store.list()] == [new]
    assert store.find(MODEL, old) is not None
    assert store.find(MODEL, old[:8]) == store.find(MODEL, old)


def test_a_pinned_revision_is_its_own_and_stays(store: Store, standin: StandIn) -> None:
    pinned = standin.add(MODEL, checkpoint(weights=100), branch="v1")
    standin.add(MODEL, checkpoint(weights=200))
    assert store.pull(MODEL, "v1").revision == pinned
    assert store.find(MODEL) is None
    standin.add(MODEL, checkpoint(weights=300), branch="v1")
    found = store.find(MODEL, "v1")
    assert found is not None
    assert found.revision == pinned
    assert store.pull(MODEL, pinned).revision == pinned


@pytest.mark.parametrize("cut", [0, 1, 15_000])
def test_a_broken_transfer_goes_on_where_it_ended(store: Store, standin: StandIn, cut: int) -> None:
    files = checkpoint()
    standin.add(MODEL, files)
    standin.faults["model.safetensors"] = Fault(times=2, cut_after=cut)
    found = store.pull(MODEL)
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    starts = [s.range for s in standin.downloads("model.safetensors")]
    expected = [f"bytes={n * cut}-" for n in range(3)] if cut else [None] * 3
    assert [r or "bytes=0-" for r in starts] == [r or "bytes=0-" for r in expected]


def test_a_stopped_pull_is_taken_up_by_the_next_one(store: Store, standin: StandIn) -> None:
    files = checkpoint(weights=2_000_000)
    standin.add(MODEL, files)
    standin.delay = 0.02

    def stop_half_way(progress: Progress) -> None:
        if (progress.bytes_done or 0) > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(MODEL, progress=stop_half_way)
    assert store.find(MODEL) is None
    (listed,) = store.list()
    assert not listed.complete
    assert listed.revision is None
    assert listed.bytes > 1_000_000
    standin.delay = 0.0
    standin.seen.clear()
    found = Store(store.home, store.hub).pull(MODEL)
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    (again,) = standin.downloads("model.safetensors")
    assert int((again.range or "").removeprefix("bytes=").removesuffix("-")) >= 1_000_000
    assert not list(store.root.rglob("*.part*"))
