"""From the word for a model to the folder with its files: a local folder, a GGUF file, or a hub model in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sakuradite.errors import UnsupportedModelError
from sakuradite.hub.names import local_path
from sakuradite.hub.registry import check_code
from sakuradite.hub.safety import json_object
from sakuradite.hub.selection import CONFIG, folder_sizes, select
from sakuradite.hub.store import Store
from sakuradite.hub.transfer import OnProgress, silent


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder that can be loaded.

    `model` is the hub id, or the absolute path of a local folder or GGUF file; `revision` is the commit of a hub model.
    `managed` ones lie in the store. `created` is the hub's release time, or the files' own, in seconds since the epoch.
    """

    model: str
    path: Path
    revision: str | None
    managed: bool
    created: int


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    home: Path,
    progress: OnProgress = silent,
    store: Store | None = None,
) -> Checkpoint:
    """The files of a model, downloaded on first use.

    What is in the store is used as it is, without asking the hub: a branch stays at the commit of its last `pull`.
    Offline, a complete snapshot of Hugging Face's cache serves too, where it lies. Raises what `Store.pull` raises,
    and for a local one ModelNotFoundError, UnsupportedModelError.
    """
    if path := local_path(model):
        return _local(path, revision, home, progress)
    store = store or Store(home)
    found = store.find(model, revision) or store.pull(model, revision, offline, progress)
    created = int(found.released or found.pulled or _created(found.path))
    return Checkpoint(model, found.path, found.revision, found.managed, created)


def _local(path: Path, revision: str | None, home: Path, progress: OnProgress) -> Checkpoint:
    if revision is not None:
        raise UnsupportedModelError(f"{path} is on this machine's disk and has no revisions", param="revision")
    if path.is_dir():
        try:
            select(folder_sizes(path), lambda name: (path / name).read_bytes())
            check_code(json_object((path / CONFIG).read_bytes(), CONFIG))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path} is refused: {error.message}", param="model") from None
        return Checkpoint(str(path), path, None, False, _created(path))
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(f"{path} is neither a checkpoint folder nor a .gguf file", param="model")
    from sakuradite.hub import gguf

    return Checkpoint(str(path), gguf.to_checkpoint(path, home, progress), None, False, int(path.stat().st_mtime))


def _created(folder: Path) -> int:
    return int((folder / CONFIG).stat().st_mtime)
