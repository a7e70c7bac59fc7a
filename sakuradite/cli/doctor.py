"""`sakuradite doctor`: what is wrong with an installation, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import typer

from sakuradite.cli.exits import REFUSED
from sakuradite.cli.options import Json
from sakuradite.cli.output import is_terminal, print_json, size
from sakuradite.cli.place import Place, place_of
from sakuradite.errors import APIError, SakuraditeError, TransportError

type Level = Literal["ok", "note", "problem"]

EXTRAS = {
    "torch": (
        "models on PyTorch",
        (
            "ray",
            "torch",
            "transformers",
            "torchvision",
            "tokenizers",
            "safetensors",
            "gguf",
            "jinja2",
            "num2words",
            "PIL",
        ),
    ),
    "mlx": (
        "models on MLX, for Apple Silicon",
        ("ray", "mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "gguf", "jinja2", "PIL"),
    ),
    "server": ("sakuradite serve, check", ("ray", "uvicorn", "httptools", "prometheus_client", "zstandard")),
    "batch": ("sakuradite batch", ("ray", "pyarrow", "pandas")),
    "otel": ("traces by OpenTelemetry", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
    "dev": ("the tests of Sakuradite itself", ("pytest", "hypothesis", "mypy", "ruff")),
}
"""Each extra with what it is for and its modules, of which the first few are told with their versions."""
TOLD = 3
RAY_VERSION = (2, 60)  # what the cluster part was measured and tested with, at least
MIN_FREE_BYTES = 2_000_000_000  # a small model and its conversion


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it is and, where something is wrong, what to do."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def doctor(context: typer.Context, json: Json = False) -> None:
    """Say what is wrong with this installation, and what to do. Exit code 1 when there is a problem."""
    findings = list(examine(place_of(context)))
    if json:
        fields = ("subject", "level", "found", "advice")
        print_json({"findings": [{name: getattr(finding, name) for name in fields} for finding in findings]})
    else:
        for finding in findings:
            _print(finding)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(REFUSED)


def examine(place: Place) -> Iterator[Finding]:
    """Every finding, in the order in which somebody would meet them."""
    checks: tuple[Callable[[Place], Iterator[Finding]], ...] = (
        _python,
        _extras,
        _traces,
        _devices,
        _settings,
        _home,
        _temporary,
        _daemon,
    )
    for check in checks:
        yield from check(place)


def _python(place: Place) -> Iterator[Finding]:
    system = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "win32":
        advice = "clients of a daemon work; to serve or to be embedded use WSL2 or a container"
        yield Finding("platform", "note", system, advice)
    else:
        yield Finding("platform", "ok", system)


def _extras(place: Place) -> Iterator[Finding]:
    for extra, (purpose, modules) in EXTRAS.items():
        missing = [module for module in modules if not _is_there(module)]
        if missing:
            found = f"{purpose}: not installed ({', '.join(missing)} missing)"
            yield Finding(f"[{extra}]", "note", found, f"pip install 'sakuradite[{extra}]'")
        else:
            versions = ", ".join(f"{module} {_version(module)}" for module in modules[:TOLD])
            yield Finding(f"[{extra}]", "ok", f"{purpose}: {versions}")
    if find_spec("ray") is not None:
        numbers = tuple(int(part) for part in _version("ray").split(".")[:2])
        if numbers < RAY_VERSION:
            yield Finding(
                "Ray", "problem", f"version {_version('ray')} is too old", "pip install -U 'ray[serve]>=2.60'"
            )


def _traces(place: Place) -> Iterator[Finding]:
    from sakuradite.cluster import tracing

    try:
        tracing.check()
    except SakuraditeError as error:
        yield Finding("traces", "problem", str(error))
    else:
        if tracing.wanted():
            yield Finding("traces", "ok", "OpenTelemetry's variables ask for them")


def _devices(place: Place) -> Iterator[Finding]:
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            yield Finding("GPU", "ok", f"{', '.join(names)} (CUDA {torch.version.cuda})")
        elif torch.backends.mps.is_available():
            yield Finding("GPU", "ok", "Apple GPU (MPS)")
        elif shutil.which("nvidia-smi"):
            advice = "install a torch build for your driver's CUDA: https://pytorch.org/get-started"
            yield Finding("GPU", "problem", f"nvidia-smi is there, but torch {torch.__version__} sees no GPU", advice)
        else:
            yield Finding("GPU", "note", f"none; models run on {os.cpu_count()} CPU cores")
    if sys.platform == "darwin" and platform.machine() == "arm64" and find_spec("mlx") is None:
        yield Finding("MLX", "note", "this Mac could run models faster with MLX", "pip install 'sakuradite[mlx]'")


def _settings(place: Place) -> Iterator[Finding]:
    from sakuradite.config import client_settings, server_settings

    try:
        settings = client_settings(place.home, base_url=place.base_url)
        server_settings(place.home)
    except SakuraditeError as error:
        yield Finding("settings", "problem", str(error), "correct that file, or move it away")
        return
    given = [f"{name} from {origin}" for name, origin in settings.origin.items() if origin != "default"]
    yield Finding("settings", "ok", ", ".join(given) or "all defaults")


def _home(place: Place) -> Iterator[Finding]:
    from sakuradite.config import home_directory
    from sakuradite.http.keys import FILE_NAME, read_admin_key

    home, _ = home_directory(place.home)
    try:
        there = home.exists()
    except OSError as error:  # a name too long, a loop of links
        yield Finding("home", "problem", f"{home}: {error.strerror}", "set SAKURADITE_HOME to a folder of yours")
        return
    if not there:
        yield Finding("home", "note", f"{home} does not exist yet", "it is made when it is needed")
        home = next(parent for parent in home.parents if parent.exists())
    elif not home.is_dir():
        yield Finding("home", "problem", f"{home} is no folder", "set SAKURADITE_HOME to a folder of yours")
        return
    elif sys.platform != "win32" and stat.S_IMODE(home.stat().st_mode) & 0o022:
        yield Finding("home", "problem", f"{home} can be written by others", f"chmod go-w {home}")
    else:
        yield Finding("home", "ok", str(home))
    if not os.access(home, os.W_OK):
        yield Finding("home", "problem", f"{home} cannot be written by you", "set SAKURADITE_HOME to a folder of yours")
    free = shutil.disk_usage(home).free
    if free < MIN_FREE_BYTES:
        advice = "free some, or set SAKURADITE_HOME to another disk"
        yield Finding("disk", "problem", f"{size(free)} free at {home}", advice)
    else:
        yield Finding("disk", "ok", f"{size(free)} free")
    try:
        found = read_admin_key(home)
    except SakuraditeError as error:
        yield Finding(FILE_NAME, "problem", str(error), "then start the daemon again")
    else:
        yield Finding(FILE_NAME, "ok", "in the home, yours alone" if found else "none; the daemon makes one")


def _temporary(place: Place) -> Iterator[Finding]:
    from sakuradite.cluster.local import MAX_PLACE, short_place

    folder = tempfile.gettempdir()
    if sys.platform != "win32" and (short := short_place()) != folder:
        found = f"{folder} is too long for Ray's Unix sockets, or not writable"
        if short is None:
            advice = f"set TMPDIR to a writable folder whose path has at most {MAX_PLACE} bytes"
            yield Finding("TMPDIR", "problem", f"{found}, and so are /tmp and /var/tmp", advice)
        else:
            yield Finding("TMPDIR", "note", f"{found}; Ray's files go to {short}")
    shared = Path("/dev/shm")
    if shared.is_dir() and (total := shutil.disk_usage(shared).total) < 128 << 20:
        yield Finding(
            "/dev/shm", "note", f"{size(total)}; Ray will use a small object store", "docker run --shm-size=1g"
        )


def _daemon(place: Place) -> Iterator[Finding]:
    try:
        url = place.daemon_url()
        with place.client() as client:
            try:
                names = client.models.ready()
                yield Finding("daemon", "ok", f"{url} answers; ready: {', '.join(names) or 'no model yet'}")
            except APIError as error:
                advice = "set SAKURADITE_API_KEY to the daemon's key" if error.status == 401 else "see its log"
                yield Finding("daemon", "problem", f"{url}: {error}", advice)
            try:
                client.models.operations()
                yield Finding("admin key", "ok", "accepted by the daemon")
            except APIError as error:
                advice = "use the daemon's home, or set SAKURADITE_ADMIN_KEY"
                yield Finding("admin key", "problem" if error.status != 401 else "note", str(error), advice)
    except TransportError as error:
        if error.sent:
            yield Finding("daemon", "problem", str(error), "something else may be listening there")
        else:
            yield Finding("daemon", "note", str(error))
            yield from _port(url)
    except SakuraditeError as error:
        yield Finding("daemon", "problem", str(error))


def _port(url: str) -> Iterator[Finding]:
    """Whether a daemon could listen where none answers."""
    from sakuradite.client.http import is_loopback

    parts = urlsplit(url)
    if not is_loopback(url) or parts.port is None:
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", parts.port))
            yield Finding("port", "ok", f"{parts.port} is free for: sakuradite serve")
        except OSError as error:
            yield Finding("port", "problem", f"{parts.port}: {error.strerror}", "choose another: serve --port")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _version(module: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(module.replace("_", "-").replace(".", "-"))
    except PackageNotFoundError:
        return "?"


def _print(finding: Finding) -> None:
    mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.level]
    if is_terminal():
        colour = {"ok": "green", "note": "yellow", "problem": "red"}[finding.level]
        mark = typer.style(mark, fg=colour, bold=finding.level == "problem")
    print(f"{mark} {finding.subject}: {finding.found}")
    if finding.advice:
        print(f"          {finding.advice}")
