"""The folder of a job: a part is there or it is not, one process at a time, nothing of another's is taken for ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sakuradite.batch.folder import Folder
from sakuradite.errors import ConfigurationError, InsufficientStorageError, InvalidLifecycleError


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "out.jsonl")
    assert made.open(restart=False) is None
    made.begin({"version": 1, "long": 10**30})
    return made


def test_parts_come_back_in_order_with_what_they_sum_up_to(folder: Folder) -> None:
    folder.add(11, [b"c", b"d"], 1, 20)
    folder.add(2, [b"a", b"b"], 0, 10)
    assert folder.done() == {11: (2, 1, 20), 2: (2, 0, 10)}
    assert list(folder.lines()) == [b"a\n", b"b\n", b"c\n", b"d\n"]


def test_another_process_goes_on_with_what_was_released(folder: Folder) -> None:
    folder.add(0, [b"a"], 0, 1)
    folder.release()
    again = Folder(folder.target)
    assert again.open(restart=False) == {"version": 1, "long": 10**30}
    assert again.done() == {0: (1, 0, 1)}


def test_one_process_at_a_time(folder: Folder) -> None:
    other = Folder(folder.target)
    with pytest.raises(InvalidLifecycleError, match=r"another process is working on .*out\.jsonl"):
        other.open(restart=True)


def test_a_file_that_was_not_written_to_its_end_is_no_part(folder: Folder) -> None:
    (folder.path / "part-0000003-1-0-5-9.tmp").write_bytes(b"hal")
    assert folder.done() == {}
    assert list(folder.lines()) == []
    folder.release()
    assert Folder(folder.target).open(restart=False) is not None


def test_a_part_that_a_power_failure_cut_off_is_decided_again(folder: Folder) -> None:
    folder.add(0, [b"whole"], 0, 1)
    folder.add(1, [b"cut"], 0, 1)
    (cut,) = folder.path.glob("part-0000001-*")
    cut.write_bytes(b"")
    assert folder.done() == {0: (1, 0, 1)}
    assert list(folder.lines()) == [b"whole\n"]


def test_a_full_disk_is_told_with_what_to_do_and_leaves_no_half_part(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(InsufficientStorageError, match="No space left on device; what is done is kept, run"):
        folder.add(0, [b"a"], 0, 1)
    assert sorted(os.listdir(folder.path)) == ["lock", "manifest.json"]


def test_restart_throws_away_what_there_is(folder: Folder) -> None:
    folder.add(0, [b"a"], 0, 1)
    folder.release()
    again = Folder(folder.target)
    assert again.open(restart=True) is None
    assert again.done() == {}


def test_an_output_that_exists_is_not_replaced_unasked(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("precious")
    with pytest.raises(ConfigurationError, match="exists; add --restart to replace it"):
        Folder(target).open(restart=False)
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert Folder(target).open(restart=True) is None
    assert target.read_text() == "precious"


def test_a_job_that_replaces_an_output_can_be_gone_on_with(folder: Folder) -> None:
    folder.release()
    folder.target.write_text("old")
    assert Folder(folder.target).open(restart=False) is not None


def test_removed_means_removed(folder: Folder) -> None:
    folder.add(0, [b"a"], 0, 1)
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_that_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.batch"
    path.mkdir()
    (path / "manifest.json").write_text("{torn")
    with pytest.raises(ConfigurationError, match="is not of a bulk job"):
        Folder(tmp_path / "out.jsonl").open(restart=False)
    assert (path / "manifest.json").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_with_other_things_in_it_is_left_alone(restart: bool, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.batch"
    path.mkdir()
    (path / "part-one.txt").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"part-one\.txt is of no bulk job"):
        Folder(tmp_path / "out.jsonl").open(restart)
    assert os.listdir(path) == ["part-one.txt"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.batch").write_text("a file")
    with pytest.raises(InsufficientStorageError, match="File exists"):
        Folder(tmp_path / "out.jsonl").open(restart=False)
