"""Hugging Face's own cache, read and never written: what other programs have already downloaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.selection import CONFIG, folder_names, select


def folder() -> Path:
    """Where that cache is (HF_HUB_CACHE, HF_HOME)."""
    return Path(constants.HF_HUB_CACHE)


def snapshot(model: str, revision: str) -> Path | None:
    """The cached snapshot of a revision; None when there is none. It may be incomplete."""
    found = try_to_load_from_cache(model, CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def complete_snapshot(model: str, revision: str) -> Path | None:
    """The cached snapshot of a revision with all that a load needs, inside the cache; None when there is none."""
    found = snapshot(model, revision)
    if found is None:
        return None
    sizes = {name: real.stat().st_size for name in folder_names(found) if (real := file(found, name))}
    try:
        select(sizes, lambda name: (found / name).read_bytes())
    except UnsupportedModelError:
        return None
    return found


def file(snapshot: Path, name: str) -> Path | None:
    """The real file behind a name of a snapshot; None when it is not there, or lies outside the cache."""
    try:
        real = (snapshot / name).resolve(strict=True)
    except OSError:
        return None
    return real if real.is_file() and real.is_relative_to(folder().resolve()) else None
