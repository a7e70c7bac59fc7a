"""Each package imports only what stands above it, nothing heavy at import, and every module says what it is for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sakuradite

ROOT = Path(sakuradite.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# What a part may import of the package, besides itself. The vocabulary stands above everything.
VOCABULARY = {"errors", "config", "records", "questions", "answers", "operations", "images"}
LAYERS = {
    "errors": set[str](),
    "records": {"errors"},
    "config": {"errors"},
    "images": {"records"},
    "questions": {"records", "errors"},
    "answers": {"questions", "records"},
    "operations": {"config", "errors"},
    "hub": VOCABULARY | {"engine"},  # inspect asks the engine which checkpoints it can load
    "engine": VOCABULARY,
    "http": VOCABULARY,
    "cluster": VOCABULARY | {"engine", "hub", "http"},
    "client": VOCABULARY | {"cluster", "hub", "http"},
    "batch": VOCABULARY | {"engine", "hub", "http", "cluster", "client"},
    "cli": VOCABULARY | {"batch", "client", "cluster", "hub", "http"},
}
HEAVY = {
    "PIL",
    "zstandard",
    "ray",
    "torch",
    "transformers",
    "mlx",
    "mlx_lm",
    "mlx_vlm",
    "pandas",
    "pyarrow",
    "uvicorn",
    "gguf",
    "safetensors",
}
# Modules that are themselves only imported where their library is needed.
HEAVY_ALLOWED = {"engine/torch", "engine/mlx", "cluster", "hub/gguf", "http/protocol"}


def imports(path: Path, top_level_only: bool) -> list[str]:
    """Dotted names that a module imports, at its top level or anywhere in it; not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(tree.body) if top_level_only else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_stands_above_it(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = LAYERS.get(part, set(LAYERS)) | {part}
    used = {name.split(".")[1] for name in imports(path, top_level_only=False) if name.startswith("sakuradite.")}
    if public := used - set(LAYERS):  # the SDK's own names, as a user imports them
        assert public <= set(sakuradite.__all__) | {"__version__"}
        used = used - public | {"client"}
    assert used <= allowed


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if not name.startswith(tuple(HEAVY_ALLOWED)):
        assert {n.split(".")[0] for n in imports(path, top_level_only=True)} & HEAVY == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, sakuradite; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) & (HEAVY | {"httpx", "typer", "rich", "prompt_toolkit", "huggingface_hub"}) == set()
