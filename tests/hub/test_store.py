"""The store: pulling, resuming, sharing, listing, removing, and what may never happen to it."""

from __future__ import annotations

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sakuradite.errors import HubUnavailableError, InvalidLifecycleError, ModelNotFoundError
from sakuradite.hub import remote
from sakuradite.hub.store import Store
from sakuradite.operations import Progress
from tests.hub.conftest import checkpoint, environment, sharded, start, write
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


def test_a_file_that_was_lost_is_fetched_again(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, sharded())
    found = store.pull(MODEL)
    (found.path / "model-00002-of-00003.safetensors").unlink()
    (found.path / "model-00003-of-00003.safetensors").write_bytes(b"cut")
    assert store.find(MODEL) is None
    assert not next(iter(store.list())).complete
    standin.seen.clear()
    assert store.pull(MODEL).path == found.path
    fetched = {s.path.rsplit("/", 1)[1] for s in standin.seen if s.server == "cdn"}
    assert fetched == {"model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}
    assert store.find(MODEL) is not None


@pytest.mark.parametrize(
    "fault",
    [
        Fault(corrupt=True),
        Fault(times=3, status=503),
        Fault(status=429, headers={"retry-after": "0"}),
        Fault(times=2, status=500),
    ],
    ids=["wrong bytes", "busy", "rate limited", "broken"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_fault_of_the_hub_that_passes_is_survived(store: Store, standin: StandIn, fault: Fault, name: str) -> None:
    files = checkpoint()
    standin.add(MODEL, files)
    standin.faults[name] = replace(fault)
    found = store.pull(MODEL)
    assert (found.path / name).read_bytes() == files[name]
    assert standin.faults[name].times == 0


def test_wrong_bytes_are_never_kept(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    standin.faults["model.safetensors"] = Fault(times=2, corrupt=True)
    with pytest.raises(HubUnavailableError, match=r"model\.safetensors of org/tiny arrived twice with a wrong hash"):
        store.pull(MODEL)
    assert store.find(MODEL) is None


def test_a_server_without_ranges_sends_it_all_again(store: Store, standin: StandIn) -> None:
    files = checkpoint()
    standin.add(MODEL, files)
    standin.faults["model.safetensors"] = Fault(times=1, cut_after=9_000)

    def after_the_cut(name: str) -> None:
        if name == "model.safetensors" and standin.faults[name].times == 0 and standin.faults[name].cut_after:
            standin.faults[name] = Fault(times=1, ignore_range=True)

    standin.before_send = after_the_cut
    found = store.pull(MODEL)
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert [s.range for s in standin.downloads("model.safetensors")] == [None, "bytes=9000-"]


def test_a_hub_that_never_sends_is_given_up_with_what_came_kept(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    standin.faults["model.safetensors"] = Fault(times=1, cut_after=9_000)

    def then_nothing(name: str) -> None:
        if name == "model.safetensors" and standin.faults[name].times == 0 and standin.faults[name].cut_after:
            standin.faults[name] = Fault(times=99, cut_after=0)

    standin.before_send = then_nothing
    with pytest.raises(HubUnavailableError, match="cannot be reached"):
        store.pull(MODEL)
    assert len(standin.downloads("model.safetensors")) == 1 + remote.ATTEMPTS
    (part,) = store.root.rglob("model.safetensors.part")
    assert part.stat().st_size == 9_000


def test_the_token_goes_to_the_hub_and_not_to_the_cdn(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.add(MODEL, checkpoint(), gated=True, readers={"hf_reader"})
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    store.pull(MODEL)
    assert {s.authorization for s in standin.seen if s.server == "hub"} == {"Bearer hf_reader"}
    assert {s.authorization for s in standin.seen if s.server == "cdn"} == {None}
    assert not any(b"hf_reader" in path.read_bytes() for path in store.root.rglob("*") if path.is_file())


def test_an_existing_login_is_used(store: Store, standin: StandIn, tmp_path: Path) -> None:
    standin.add(MODEL, checkpoint(), private=True, readers={"hf_reader"})
    (tmp_path / "no-token").write_text("hf_reader\n")
    assert store.pull(MODEL).complete


def test_files_of_hugging_faces_cache_are_linked_after_their_hash_was_checked(
    store: Store, standin: StandIn, tmp_path: Path
) -> None:
    files = sharded()
    commit = standin.add(MODEL, files)
    blobs = write(tmp_path / "hf-cache" / "models--org--tiny" / "blobs", files)
    snapshot = tmp_path / "hf-cache" / "models--org--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    damaged = blobs / "model-00001-of-00003.safetensors"
    damaged.write_bytes(bytes(len(files[damaged.name])))
    found = store.pull(MODEL)
    assert {s.path.rsplit("/", 1)[1] for s in standin.seen if s.server == "cdn"} == {damaged.name}
    assert {name: (found.path / name).read_bytes() for name in files if not name.endswith((".md", ".py"))} == {
        name: data for name, data in files.items() if not name.endswith((".md", ".py"))
    }
    assert (found.path / "model-00002-of-00003.safetensors").samefile(blobs / "model-00002-of-00003.safetensors")
    assert not any(path.is_symlink() for path in store.root.rglob("*"))


def test_remove_frees_everything_of_a_model(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint(weights=100))
    standin.add("org/other", checkpoint())
    store.pull(MODEL)
    standin.add(MODEL, checkpoint(weights=200))
    store.pull(MODEL)
    other = store.pull("org/other")
    (listed,) = (m for m in store.list() if m.model == MODEL)
    assert store.remove(MODEL) == listed.bytes
    assert list(store.list()) == [other]
    assert not (store.root / "org--tiny").exists()
    with pytest.raises(ModelNotFoundError, match=r"org/tiny is not in the store .*/home/models"):
        store.remove(MODEL)


def test_remove_waits_for_nobody(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    outcomes: list[str] = []

    def remove_meanwhile(progress: Progress) -> None:
        if progress.phase == "downloading" and not outcomes:
            with pytest.raises(InvalidLifecycleError, match="org/tiny is being downloaded"):
                store.remove(MODEL)
            outcomes.append("refused")

    store.pull(MODEL, progress=remove_meanwhile)
    assert outcomes == ["refused"]
    assert store.find(MODEL) is not None


PULL = """
import sys
from pathlib import Path
from sakuradite.hub.store import Store
phases = []
Store(Path(sys.argv[1])).pull("org/tiny", progress=lambda p: phases.append(p.phase))
print(",".join(dict.fromkeys(phases)))
"""


def test_two_processes_that_pull_one_model_download_it_once(
    store: Store, standin: StandIn, home: Path, tmp_path: Path
) -> None:
    files = checkpoint(weights=2_000_000)
    standin.add(MODEL, files)
    standin.delay = 0.02  # 1.3 s for the weights: the second process is there long before they are
    env = environment(standin, HF_HOME=str(tmp_path / "hf"))

    def until_both_asked(name: str) -> None:
        """Hold the first download until the second process has asked which commit there is."""
        while sum(s.path.startswith("/api/models/") for s in standin.seen) < 2:
            time.sleep(0.01)

    standin.before_send = until_both_asked
    processes = [start(PULL, str(home), environment=env) for _ in range(2)]
    phases = sorted(process.communicate(timeout=120)[0].strip() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert phases == ["resolving,downloading,done", "resolving,waiting,done"]
    assert len(standin.downloads("model.safetensors")) == 1
    found = store.find(MODEL)
    assert found is not None
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_killed_pull_leaves_nothing_that_looks_whole_and_goes_on(
    store: Store, standin: StandIn, home: Path, tmp_path: Path
) -> None:
    files = checkpoint(weights=2_000_000)
    standin.add(MODEL, files)
    standin.delay = 0.02
    process = start(PULL, str(home), environment=environment(standin, HF_HOME=str(tmp_path / "hf")))
    deadline = time.monotonic() + 60
    while sum(p.stat().st_size for p in home.rglob("model.safetensors.part")) < 1_000_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert store.find(MODEL) is None
    assert [m.complete for m in store.list()] == [False]
    standin.delay = 0.0
    standin.seen.clear()
    found = store.pull(MODEL)
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert (standin.downloads("model.safetensors")[0].range or "bytes=0-") > "bytes=1"


def test_an_unreadable_record_is_written_anew(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    found = store.pull(MODEL)
    (store.root / "org--tiny" / "model.json").write_text("{")
    assert store.find(MODEL) is None
    assert [m.complete for m in store.list()] == [False]
    standin.seen.clear()
    assert store.pull(MODEL).path == found.path
    assert not [s for s in standin.seen if s.server == "cdn"]


def test_two_threads_that_pull_one_model_download_it_once(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint(weights=500_000))
    standin.delay = 0.02
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: store.pull(MODEL), range(2))
    assert one == two
    assert len(standin.downloads("model.safetensors")) == 1


def test_a_file_too_large_for_plain_http_is_left_to_huggingface_hub(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = checkpoint()
    standin.add(MODEL, files)
    monkeypatch.setattr(remote, "MAX_OVER_HTTP", 30_000)
    found = store.pull(MODEL)
    assert capfd.readouterr() == ("", "")
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert "HEAD" in {s.method for s in standin.seen if s.path.endswith("model.safetensors")}
    assert {p.name for p in found.path.iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors",
    }  # fmt: skip
    assert oct((found.path / "model.safetensors").stat().st_mode)[-3:] == "600"


def test_a_hub_that_is_busy_at_first_is_asked_again(store: Store, standin: StandIn) -> None:
    commit = standin.add(MODEL, checkpoint())
    standin.faults[f"/api/models/{MODEL}"] = Fault(times=2, status=503)
    assert store.pull(MODEL).revision == commit
    assert len([s for s in standin.seen if s.path.startswith("/api/models/")]) == 3
