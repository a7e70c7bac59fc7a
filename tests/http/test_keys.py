"""The daemon's admin.key: made once, owner-only, and refused when others could have had it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sakuradite.errors import ConfigurationError
from sakuradite.http.keys import ensure_admin_key, read_admin_key


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    key = ensure_admin_key(home)
    assert len(key) > 40
    assert key.isascii()
    assert stat.S_IMODE((home / "admin.key").stat().st_mode) == 0o600
    assert ensure_admin_key(home) == key == read_admin_key(home)
    assert os.listdir(home) == ["admin.key"]
    assert ensure_admin_key(tmp_path / "other") != key


def test_a_home_without_a_key_has_none(tmp_path: Path) -> None:
    assert read_admin_key(tmp_path) is None
    assert read_admin_key(tmp_path / "missing") is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_a_key_that_others_could_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    ensure_admin_key(tmp_path)
    (tmp_path / "admin.key").chmod(mode)
    for use in (read_admin_key, ensure_admin_key):
        with pytest.raises(ConfigurationError, match="chmod 600"):
            use(tmp_path)


def test_a_symlink_is_refused(tmp_path: Path) -> None:
    ensure_admin_key(tmp_path / "real")
    (tmp_path / "admin.key").symlink_to(tmp_path / "real" / "admin.key")
    for use in (read_admin_key, ensure_admin_key):
        with pytest.raises(ConfigurationError, match="symlink"):
            use(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "admin.key", 0o600)
    with pytest.raises(ConfigurationError, match="not a plain file"):
        read_admin_key(tmp_path / "a")
    (tmp_path / "b" / "admin.key").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="not a plain file"):
        read_admin_key(tmp_path / "b")


def test_a_key_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_admin_key(tmp_path)
    monkeypatch.setattr("sakuradite.http.keys.os.geteuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match="another user"):
        read_admin_key(tmp_path)


@pytest.mark.parametrize("content", ["", " \n", "clé"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "admin.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_admin_key(tmp_path)


def test_windows_needs_an_explicit_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakuradite.http.keys.sys.platform", "win32")
    assert read_admin_key(tmp_path) is None
    with pytest.raises(ConfigurationError, match="SAKURADITE_ADMIN_KEY"):
        ensure_admin_key(tmp_path)
