"""Each way in which a model cannot be had says which one it is, and what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sakuradite.errors import (
    APIError,
    ConfigurationError,
    HubUnavailableError,
    InsufficientStorageError,
    ModelAccessDeniedError,
    ModelNotFoundError,
    OfflineMissingError,
    UnsupportedModelError,
    ValidationError,
)
from sakuradite.hub import remote, transfer
from sakuradite.hub.remote import Hub
from sakuradite.hub.resolve import resolve
from sakuradite.hub.store import Store
from tests.hub.conftest import LLAMA, checkpoint, environment, safetensors, sharded, start
from tests.hub.standin import Fault, StandIn

MODEL = "org/tiny"
WHERE = "on the machine that downloads (the daemon's, where one runs)"


@pytest.mark.parametrize(
    ("kind", "token", "error", "says"),
    [
        ("gated", None, ModelAccessDeniedError, ["is gated", "no token is set", "HF_TOKEN", "hf auth login", WHERE,
                                                 "accept the terms at {endpoint}/org/tiny"]),
        ("gated", "hf_stranger", ModelAccessDeniedError, ["is gated", "the token that is set has no access yet",
                                                          "accept the terms at {endpoint}/org/tiny"]),
        ("gated", "hf_wrong", ModelAccessDeniedError, ["does not accept the token", "Replace HF_TOKEN", WHERE]),
        ("private", None, ModelNotFoundError, ["has no model 'org/tiny'", "check the spelling", "or it is private",
                                               "HF_TOKEN", WHERE]),
        ("private", "hf_stranger", ModelNotFoundError, ["has no model 'org/tiny'", "the token that is set does not"]),
        ("missing", None, ModelNotFoundError, ["has no model 'org/tiny'", "check the spelling"]),
        ("missing", "hf_reader", ModelNotFoundError, ["has no model 'org/tiny'", "check the spelling"]),
        ("missing", "hf_wrong", ModelAccessDeniedError, ["does not accept the token"]),
        ("open", "hf_wrong", ModelAccessDeniedError, ["does not accept the token", "a public model needs none"]),
    ],
)  # fmt: skip
def test_access(
    store: Store,
    standin: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    token: str | None,
    error: type[APIError],
    says: list[str],
) -> None:
    if kind != "missing":
        standin.add(MODEL, checkpoint(), gated=kind == "gated", private=kind == "private", readers={"hf_reader"})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(error) as caught:
        store.pull(MODEL)
    for words in says:
        assert words.format(endpoint=standin.endpoint) in caught.value.message
    assert token is None or token not in caught.value.message
    assert caught.value.status == {ModelAccessDeniedError: 403, ModelNotFoundError: 404}[error]
    assert store.find(MODEL) is None
    assert list(store.list()) == []
    assert not (store.root / "org--tiny").exists()


def test_a_revision_that_is_not_there(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    with pytest.raises(ModelNotFoundError, match="org/tiny has no revision 'v9'; its branches and tags are at"):
        store.pull(MODEL, "v9")


@pytest.mark.parametrize("revision", ["", "../up", "a b", "-x", "a..b", "/etc", "x" * 201])
def test_a_revision_that_cannot_be_one(store: Store, revision: str) -> None:
    with pytest.raises(ValidationError, match="is no branch, tag or commit"):
        store.pull(MODEL, revision)


@pytest.mark.parametrize(
    "model", ["", "org/na me", "org--x/y", "../etc", "a/b/c", "org/..", "org/x.git", "-x/y", "é/ü"]
)
def test_an_id_that_cannot_be_one(store: Store, standin: StandIn, model: str) -> None:
    for call in (store.pull, store.find):
        with pytest.raises(ValidationError, match="is no hub id"):
            call(model)
    with pytest.raises(ModelNotFoundError, match="what is named by a path is yours, and never deleted"):
        store.remove(model)
    assert standin.seen == []


def test_an_unreachable_hub(home: Path, standin: StandIn) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(HubUnavailableError, match=r"cannot be reached.*HTTPS_PROXY.*offline=True") as caught:
            Store(home, Hub(endpoint)).pull(MODEL)
    assert (caught.value.status, caught.value.retryable) == (502, True)


def test_a_hub_that_is_down_or_busy(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    standin.faults["model.safetensors"] = Fault(times=99, status=503, headers={"retry-after": "0"})
    with pytest.raises(HubUnavailableError, match="answered 503; try again later") as caught:
        store.pull(MODEL)
    assert caught.value.retry_after == 0


def test_a_silent_hub_is_given_up(store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.05)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(HubUnavailableError, match="cannot be reached"):
            Store(store.home, Hub(f"http://127.0.0.1:{mute.getsockname()[1]}")).pull(MODEL)


NO_WEIGHTS = {"config.json": json.dumps(LLAMA).encode(), "tokenizer.json": b"{}"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (NO_WEIGHTS | {"pytorch_model.bin": b"x"}, r"weights are pickles \(pytorch_model.bin\), which can run code"),
        (NO_WEIGHTS | {"model.pth": b"x", "model.onnx": b"x"}, r"its weights are pickles \(model.pth\)"),
        (NO_WEIGHTS | {"tf_model.h5": b"x"}, r"weights are of another framework \(tf_model.h5\)"),
        (NO_WEIGHTS | {"q4.gguf": b"x"}, r"holds GGUF files \(q4.gguf\): download one and give the path"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "it is an adapter"),
        ({"model_index.json": b"{}", "unet/diffusion.safetensors": b"x"}, "it is a diffusion pipeline"),
        (NO_WEIGHTS | {"consolidated.safetensors": b"x"}, "it has consolidated.safetensors, but neither"),
        (NO_WEIGHTS, r"it has no weights \(model.safetensors\)"),
        ({"model.safetensors": b"x"}, r"it has no config.json"),
        (sharded() | {"model.safetensors.index.json": b"[]"}, "holds no JSON object"),
        (sharded() | {"model.safetensors.index.json": b"{"}, "is not JSON"),
        (sharded() | {"model.safetensors.index.json": b"{}"}, "has no weight_map"),
        (sharded() | {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
         "names gone.safetensors, which is not there: the checkpoint is incomplete"),
        (sharded() | {"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'},
         r"names '../../x.safetensors', which is no safetensors file of the same folder"),
        (sharded() | {"model.safetensors.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}'},
         "names 'pytorch_model.bin', which is no safetensors file"),
        (checkpoint(config={"model_type": "mystery", "auto_map": {"AutoModelForCausalLM": "modeling.Mystery"}}),
         r"needs Python code from its repository \(auto_map in config.json\), and custom code is not run"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_refused_before_the_download(
    store: Store, standin: StandIn, files: dict[str, bytes], reason: str
) -> None:
    standin.add(MODEL, files)
    with pytest.raises(UnsupportedModelError, match=f"org/tiny is refused: .*{reason}") as caught:
        store.pull(MODEL)
    assert caught.value.status == 422
    assert not [seen for seen in standin.seen if seen.path.endswith((".safetensors", ".bin", ".pth"))]
    assert store.find(MODEL) is None


def test_native_models_that_also_carry_code_are_loaded_without_it(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint(config=LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling_llama.Llama"}}))
    found = store.pull(MODEL)
    assert not list(found.path.rglob("*.py"))


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_offline_uses_what_is_there_and_opens_no_socket(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    commit = standin.add(MODEL, checkpoint())
    stored = store.pull(MODEL)
    opened: list[Any] = []
    monkeypatch.setattr(socket, "socket", lambda *a, **k: opened.append(a))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: opened.append(a))
    if how == "variable":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = how == "argument"
    assert store.pull(MODEL, offline=offline) == stored
    found = resolve(MODEL, offline=offline, home=store.home)
    assert (found.path, found.revision, found.managed) == (stored.path, commit, True)
    said = "offline=True (--offline) was given" if offline else "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    for call in (store.pull, lambda m, **k: resolve(m, home=store.home, **k)):
        with pytest.raises(OfflineMissingError) as caught:
            call("org/other", offline=offline)
        assert caught.value.status == 409
        for words in (str(store.root / "org--other"), constants.HF_HUB_CACHE, "HF_HUB_CACHE", said, "sakuradite pull"):
            assert words in caught.value.message
    with pytest.raises(OfflineMissingError, match=f"revision v2.*Stored revisions: {commit}, main"):
        store.pull(MODEL, "v2", offline=offline)
    assert opened == []


OFFLINE = """
import socket, sys
from pathlib import Path
def refuse(*arguments, **options):
    raise SystemExit(f"a socket was opened: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from sakuradite.hub.resolve import resolve
print(resolve("org/tiny", home=Path(sys.argv[1])).path)
resolve("org/other", home=Path(sys.argv[1]))
"""


def test_offline_by_the_environment_in_a_process_of_its_own(store: Store, standin: StandIn, tmp_path: Path) -> None:
    standin.add(MODEL, checkpoint())
    stored = store.pull(MODEL)
    standin.seen.clear()
    env = environment(standin, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    process = start(OFFLINE, str(store.home), environment=env, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert out.strip() == str(stored.path)
    assert "OfflineMissingError: org/other (revision main) is neither in the store" in err
    assert standin.seen == []


def test_a_disk_that_is_too_small_is_said_before_the_download(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint()
    standin.add(MODEL, files)
    needed = sum(len(data) for name, data in files.items() if not name.endswith((".md", ".py")))
    monkeypatch.setattr(transfer, "free_bytes", lambda path: needed - 1)
    with pytest.raises(InsufficientStorageError) as caught:
        store.pull(MODEL)
    assert caught.value.status == 507
    assert f"needs {needed} more bytes" in caught.value.message
    assert f"{needed - 1} are free" in caught.value.message
    assert not standin.downloads("model.safetensors")
    assert list(store.list()) == []
    monkeypatch.setattr(transfer, "free_bytes", lambda path: needed)
    assert store.pull(MODEL).complete


def test_a_partial_download_counts_against_what_is_needed(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.add(MODEL, checkpoint())
    standin.faults["model.safetensors"] = Fault(times=1, cut_after=10_000)

    def then_nothing(name: str) -> None:
        if name == "model.safetensors" and standin.faults[name].times == 0:
            standin.faults[name] = Fault(times=99, cut_after=0)

    standin.before_send = then_nothing
    with pytest.raises(HubUnavailableError):
        store.pull(MODEL)
    (partial,) = store.root.glob("*/*.partial")
    there = transfer.arrived(partial)
    assert there >= 10_000
    standin.faults.clear()
    monkeypatch.setattr(transfer, "free_bytes", lambda path: 5)
    total = sum(len(data) for name, data in checkpoint().items() if not name.endswith((".md", ".py")))
    with pytest.raises(InsufficientStorageError, match=f"needs {total - there} more bytes .* 5 are free"):
        store.pull(MODEL)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_during_the_download(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files = checkpoint(weights=500_000)
    standin.add(MODEL, files)
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if os.fstat(descriptor).st_size > 500_000:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        InsufficientStorageError, match=r"became full .* of \d+ bytes are there, \d+ are free"
    ) as caught:
        store.pull(MODEL)
    assert caught.value.status == 507
    assert [model.complete for model in store.list()] == [False]
    monkeypatch.setattr(os, "write", write)
    standin.seen.clear()
    found = store.pull(MODEL)
    assert (found.path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert (standin.downloads("model.safetensors")[0].range or "bytes=0-") > "bytes=1"


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk of 5 MB: a real one where this user may mount one, else writes are made to fail likewise."""
    (folder := tmp_path / "disk").mkdir()
    size = 5 << 20
    mounted = shutil.which("mount") and os.geteuid() == 0 and sys.platform == "linux"
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    if mounted:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    write = os.write

    def used() -> int:
        return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())

    def limited(descriptor: int, data: Any) -> int:
        if used() + len(data) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr(transfer, "free_bytes", lambda path: size - used())
    yield folder


def test_a_small_disk_before_and_during_the_download(small_disk: Path, standin: StandIn) -> None:
    store = Store(small_disk, Hub(standin.endpoint))
    standin.add("org/large", checkpoint(weights=3_000_000))
    with pytest.raises(InsufficientStorageError, match=r"org/large needs 60\d{5} more bytes .*, 5\d{6} are free"):
        store.pull("org/large")
    assert list(store.list()) == []
    files = checkpoint(weights=2_000_000)
    standin.add(MODEL, files)
    filler = small_disk / "filler"

    def fill(name: str) -> None:
        if name == "model.safetensors":
            filler.write_bytes(bytes(3 << 20))

    standin.before_send = fill
    with pytest.raises(InsufficientStorageError, match="became full while org/tiny was downloaded"):
        store.pull(MODEL)
    (listed,) = store.list()
    assert (listed.model, listed.complete) == (MODEL, False)
    assert store.find(MODEL) is None
    standin.before_send = lambda name: None
    filler.unlink()
    assert (store.pull(MODEL).path / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_links_never_lead_out_of_the_store(store: Store, standin: StandIn, tmp_path: Path) -> None:
    files = checkpoint()
    commit = standin.add(MODEL, files)
    found = store.pull(MODEL)
    outside = tmp_path / "outside"
    outside.write_bytes(files["model.safetensors"])
    (found.path / "model.safetensors").unlink()
    (found.path / "model.safetensors").symlink_to(outside)
    assert store.find(MODEL) is None, "a link is not taken for a file of the store"
    assert store.pull(MODEL).path == found.path
    assert not (found.path / "model.safetensors").is_symlink()
    assert outside.read_bytes() == files["model.safetensors"]

    store.remove(MODEL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (store.root / "org--tiny").symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="is a symlink or a file where a folder of the store should be"):
        store.pull(MODEL)
    (store.root / "org--tiny").unlink()
    (store.root / "org--tiny").mkdir()
    (store.root / "org--tiny" / f"{commit}.partial").symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="is a symlink"):
        store.pull(MODEL)
    assert list(elsewhere.iterdir()) == []


def test_a_partial_file_that_is_a_link_is_not_written_through(store: Store, standin: StandIn, tmp_path: Path) -> None:
    commit = standin.add(MODEL, checkpoint())
    partial = store.root / "org--tiny" / f"{commit}.partial"
    partial.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (partial / "model.safetensors.part").symlink_to(victim)
    with pytest.raises(ConfigurationError, match=r"cannot be used: Too many levels .*safetensors\.part"):
        store.pull(MODEL)
    assert victim.read_bytes() == b"precious"


def test_file_names_of_a_hub_never_lead_out_of_the_store(store: Store, standin: StandIn, tmp_path: Path) -> None:
    evil = {"../../../evil.json": b"x", "additional_chat_templates/../../evil.jinja": b"x", "/etc/evil.json": b"x"}
    standin.add(MODEL, checkpoint() | evil)
    store.pull(MODEL)
    assert not list(tmp_path.rglob("*evil*"))


def test_the_store_may_be_a_link_to_another_disk(store: Store, standin: StandIn, tmp_path: Path) -> None:
    standin.add(MODEL, checkpoint())
    (disk := tmp_path / "disk").mkdir(mode=0o755)
    store.home.mkdir()
    store.root.symlink_to(disk)
    found = store.pull(MODEL)
    assert found.path.is_relative_to(disk)
    assert oct(disk.stat().st_mode)[-3:] == "700"
    assert list(store.list()) == [found]
    store.remove(MODEL)
    assert store.find(MODEL) is None


def test_a_folder_of_somebody_else_is_refused(store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.add(MODEL, checkpoint())
    store.root.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match=r"models belongs to user \d+"):
        store.pull(MODEL)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EROFS, ConfigurationError), (errno.EACCES, ConfigurationError),
                          (errno.ENOSPC, InsufficientStorageError)],
)  # fmt: skip
def test_a_home_that_cannot_be_written(
    store: Store, standin: StandIn, monkeypatch: pytest.MonkeyPatch, number: int, error: type[APIError]
) -> None:
    standin.add(MODEL, checkpoint())

    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(error, match=f"the store {store.root} cannot be used: {os.strerror(number)} .*SAKURADITE_HOME"):
        store.pull(MODEL)


def test_a_home_below_a_file(tmp_path: Path, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint())
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be used: Not a directory"):
        Store(tmp_path / "file" / "home", Hub(standin.endpoint)).pull(MODEL)


def test_a_weight_file_of_no_bytes_is_fetched_too(store: Store, standin: StandIn) -> None:
    standin.add(MODEL, checkpoint() | {"special_tokens_map.json": b"", "model.safetensors": safetensors({})})
    found = store.pull(MODEL)
    assert (found.path / "special_tokens_map.json").read_bytes() == b""
