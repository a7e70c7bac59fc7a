"""What the word for a model means: the id of a hub repository, or something on this machine's disk.

Nothing is opened here and no hub is asked; that is `resolve`.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

from sakuradite.errors import ModelNotFoundError, ValidationError

DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,199}")


def local_path(model: str) -> Path | None:
    """The file or folder that `model` names, absolute; None when it is the id of a hub repository.

    A folder or file that is there wins over a hub id of the same spelling. Raises ModelNotFoundError for a path that
    leads nowhere, ValidationError for what is neither a path nor an id.
    """
    if not model or "\0" in model or len(model) > 4096:
        raise ValidationError("model is empty, or no name that a file or a repository can have", param="model")
    path = Path(model).expanduser()
    if _exists(path):
        return path.absolute()
    if _looks_like_path(model):
        raise ModelNotFoundError(
            f"{model!r} looks like a path, and nothing is there (from the folder {Path.cwd()} of the process that "
            "loads). Check the spelling, or give a hub id such as 'org/name'.",
            param="model",
        )
    check_hub_id(model)
    return None


def is_hub_id(model: str) -> bool:
    """Whether `model` is spelt like the id of a hub repository, `org/name` or `name`."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def check_hub_id(model: str) -> None:
    """Raise ValidationError unless `model` is spelt like a hub id."""
    if not is_hub_id(model):
        raise ValidationError(
            f"{model!r} is no hub id: 'org/name' of letters, digits, '-', '_' and '.', at most 96 characters, without "
            "'--' or '..'. A path starts with '/', './' or '~', or names something that is there.",
            param="model",
        )


def check_revision(revision: str | None) -> str:
    """The revision to ask for: a branch, a tag, a commit or refs/pr/N; `main` for None. Raises ValidationError."""
    if revision is None:
        return DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValidationError(f"revision {revision!r} is no branch, tag or commit", param="revision")
    return revision


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system, or a folder that may not be entered
        return False


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~", "\\"))
        or "\\" in model
        or model.count("/") > 1
        or model.endswith(("/", ".gguf", ".safetensors"))
        or re.match(r"[A-Za-z]:[\\/]", model) is not None
        or ("/" in model and _exists(Path(model).parent))
    )
