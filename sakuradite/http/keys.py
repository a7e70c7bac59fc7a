"""The two keys: how the daemon makes and reads `admin.key`, and the hashes that stand for keys everywhere else."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from sakuradite.config import ServerConfig
from sakuradite.errors import ConfigurationError

FILE_NAME = "admin.key"


@dataclass(frozen=True, slots=True)
class KeyHash:
    """A salted SHA-256 of a key: enough to recognise the key, useless to call with."""

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, key: str) -> KeyHash:
        """The hash of a key, with a salt of its own."""
        salt = secrets.token_bytes(16)
        return cls(salt, hashlib.sha256(salt + key.encode()).digest())

    def matches(self, presented: bytes) -> bool:
        """Whether these are the bytes of the key, in a time that does not depend on where they differ."""
        return hmac.compare_digest(hashlib.sha256(self.salt + presented).digest(), self.digest)


@dataclass(frozen=True, slots=True)
class Keys:
    """What requests are checked against. None: no inference key is asked for; no admin key opens anything."""

    inference: KeyHash | None = None
    admin: KeyHash | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Keys:
        """The hashes of a configuration's keys. Raises ConfigurationError for keys that cannot work."""
        for name, key in (("api_key", config.api_key), ("admin_key", config.admin_key)):
            if key is not None and (
                not key.strip() or not key.isascii() or not key.isprintable() or key != key.strip()
            ):
                raise ConfigurationError(f"{name} must be printable ASCII without surrounding spaces", param=name)
        if config.api_key is not None and config.api_key == config.admin_key:
            raise ConfigurationError("api_key and admin_key must differ: they open different things", param="admin_key")
        return cls(
            KeyHash.of(config.api_key) if config.api_key is not None else None,
            KeyHash.of(config.admin_key) if config.admin_key is not None else None,
        )


def without_keys(config: ServerConfig) -> ServerConfig:
    """The configuration as it may travel to other processes; the keys go along as `Keys`."""
    return config.model_copy(update={"api_key": None, "admin_key": None})


def read_admin_key(home: Path) -> str | None:
    """The key in a home's `admin.key`, None when there is no such file.

    Raises ConfigurationError when others could have read or written the file: a symlink, another owner, or open
    permissions. On Windows, where permissions do not tell, a key must be given explicitly.
    """
    path = home / FILE_NAME
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise ConfigurationError(f"{path} is a symlink; the admin key must be a plain file of your own") from None
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{path} is not a plain file")
        if status.st_uid != os.geteuid():
            raise ConfigurationError(f"{path} belongs to another user (uid {status.st_uid}); delete it or set the key")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigurationError(f"{path} can be read by others (mode {mode:04o}); chmod 600 it, or delete it")
        key = os.read(descriptor, 4096).strip().decode(errors="replace")
    finally:
        os.close(descriptor)
    if not key or not key.isascii():
        raise ConfigurationError(f"{path} holds no key; delete it, and the daemon makes a new one")
    return key


def ensure_admin_key(home: Path) -> str:
    """The home's admin key, made (mode 600) when there is none. Raises ConfigurationError as `read_admin_key` does."""
    if sys.platform == "win32":
        raise ConfigurationError("on Windows the admin key must be given: set SAKURADITE_ADMIN_KEY", param="admin_key")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (key := read_admin_key(home)) is not None:
        return key
    key = f"sk-admin-{secrets.token_urlsafe(32)}"
    # Written aside and linked into place, so that a reader never sees half a key and the first of two daemons wins.
    draft = home / f".{FILE_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(key + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, home / FILE_NAME)
    finally:
        draft.unlink()
    made = read_admin_key(home)
    if made is None:
        raise ConfigurationError(f"{home / FILE_NAME} was removed while the daemon started")
    return made
