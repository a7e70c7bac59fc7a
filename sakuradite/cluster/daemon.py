"""`sakuradite serve`: a Ray of its own or one that it joins, router and catalog on it, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sakuradite.cluster import deploy, local, tracing
from sakuradite.cluster.administration import patiently
from sakuradite.cluster.application import CATALOG_DEPLOYMENT, ROUTER_DEPLOYMENT, SERVER, server_application
from sakuradite.cluster.handles import handle_of
from sakuradite.cluster.journal import Journal
from sakuradite.config import ServerConfig, home_directory
from sakuradite.errors import ConfigurationError
from sakuradite.http.auth import Gatekeeper
from sakuradite.http.keys import Keys, ensure_admin_key

CLOSE_SECONDS = 15.0
"""For the catalog to cancel what is under way, and for a router beyond the drain time."""
LOOK_SECONDS = 0.5
"""Between looks at whether Ray is there; two in vain say that it is gone."""
INTERRUPTED = 130
"""Exit code of a second Ctrl-C."""


def serve(config: ServerConfig, restore: bool = False, say: Callable[[str], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; `say` gets the lines for the terminal (by default stdout).

    Raises ConfigurationError with one line that says what to do: the port is busy, another daemon uses the home or the
    cluster, keys cannot work, no Ray at the address, the home cannot be used. Raises InsufficientStorageError where
    the home's disk is full.
    """
    home, _ = home_directory(config.home)
    keys = Keys.of(config)
    if keys.admin is None:
        with _usable(home):
            keys = Keys.of(config.model_copy(update={"admin_key": ensure_admin_key(home)}))
    tracing.check()
    Gatekeeper(config, keys)  # refuses what would be open to others, before anything starts
    with _only_one(home, config) as announce:
        Journal(home).check()  # the catalog would only tell it in a traceback, from another process
        asyncio.run(_Daemon(config, keys, home, say or _print).run(restore, announce))


@contextlib.contextmanager
def _usable(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"the home {home} cannot be used: {error.strerror}", param="home") from None


def _print(line: str) -> None:
    print(line, flush=True)


class _Daemon:
    """One run of the daemon, on one event loop."""

    def __init__(self, config: ServerConfig, keys: Keys, home: Path, say: Callable[[str], None]) -> None:
        self._asked, self._keys, self._home, self._say = config, keys, home, say
        logs = home / "logs" if config.log_dir is None else config.log_dir
        self._config = config.model_copy(update={"home": home, "port": _free_port(config), "log_dir": logs})
        self._stop = asyncio.Event()
        self._connected = self._deployed = self._leaving = False
        self._models: list[str] = []
        self._owned = config.address is None

    async def run(self, restore: bool, announce: Callable[[ServerConfig], None]) -> None:
        self._take_signals(asyncio.get_running_loop())
        stopping = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._start(restore))
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                announce(self._config)
                await stopping
            elif self._owned:  # nobody has been promised an answer, and Ray's own way would first start to the end
                await deploy.in_thread(lambda: self._leave(0))
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.wait([starting])
            await self._take_down()

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a signal once, also where the whole group gets it while a child of ours has not become its program yet.

        Such a child shares the descriptor by which asyncio learns of signals, and would write its own into it: a first
        Ctrl-C would be taken for a second. So that descriptor only wakes the loop, and the count is by process.
        """
        ours = os.getpid()

        def note(*_: object) -> None:
            if os.getpid() == ours and not loop.is_closed():
                loop.call_soon_threadsafe(self._signalled)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
            signal.signal(number, note)
            signal.siginterrupt(number, False)  # as asyncio has it: Ray's own threads may be in a system call

    def _signalled(self) -> None:
        if self._leaving:  # all is being killed already
            return
        if self._stop.is_set():  # the second: what is ours dies with us, and the watcher clears up
            if not self._owned and self._deployed:
                with contextlib.suppress(Exception):
                    self._abandon()
            os._exit(INTERRUPTED)
        self._say("Stopping; once more to stop at once.")
        self._stop.set()

    def _watch_ray(self) -> None:
        """On a thread, because Ray's calls block the event loop once it is gone: end then, with what is left."""
        seen = 0
        while seen < 2:
            time.sleep(LOOK_SECONDS)
            matters = self._owned or self._stop.is_set()  # the head of a cluster may come back
            seen = seen + 1 if matters and local.is_gone() else 0
        asked = self._stop.is_set()
        if asked:
            self._say("Ray ended before its requests were answered: the signal has to go to this process alone.")
        else:
            print(
                "Ray has ended: its GCS or its raylet is gone. Start the daemon again, with --restore", file=sys.stderr
            )
        self._leave(0 if asked else 1)

    def _leave(self, code: int) -> None:
        """End with the processes of our Ray at once."""
        self._leaving = True
        local.abandon()
        note_of(self._home).unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    async def _start(self, restore: bool) -> None:
        self._say("Starting Ray..." if self._owned else f"Joining the Ray cluster at {self._config.address}...")
        if self._owned:
            self._connected = True
            await deploy.to_the_end(deploy.in_thread(lambda: local.acquire(cluster=True)))
        else:
            # May take as long as the network likes, and leaves nothing: Ctrl-C need not wait for it.
            await deploy.in_thread(lambda: local.join(self._config.address or "auto"))
            self._connected = True
        threading.Thread(target=self._watch_ray, name="sakuradite-watch", daemon=True).start()
        await deploy.to_the_end(deploy.in_thread(self._deploy))
        host, port = await deploy.first_answer(SERVER, self._ask(ROUTER_DEPLOYMENT, "address"))
        everywhere = "on every node, here " if self._config.routers == "node" else ""
        self._say(f"Sakuradite listens {everywhere}on {_url(host, port)}")
        if restore:
            operations = await self._ask(CATALOG_DEPLOYMENT, "restore")
            self._say(f"Restoring {', '.join(o.model for o in operations) or 'nothing'}")

    def _deploy(self) -> None:
        """Hand router and catalog to Serve, unless the cluster has them already."""
        if SERVER in deploy.applications():
            raise ConfigurationError(_other_settings(self._running_settings(), self._asked, "this cluster"))
        node = None if self._owned else local.node_id()
        self._deployed = True
        build = partial(server_application, self._config, self._keys, self._home, node=node)
        local.run_in_ray_thread(lambda: deploy.submit(SERVER, build))

    def _running_settings(self) -> dict[str, Any]:
        from ray import serve

        handle = serve.get_deployment_handle(CATALOG_DEPLOYMENT, SERVER)
        settings: dict[str, Any] = handle.settings.remote().result(timeout_s=10)
        return settings

    async def _ask(self, deployment: str, method: str) -> Any:
        handle = handle_of(deployment, SERVER)
        return await patiently(lambda: getattr(handle, method).remote())

    async def _take_down(self) -> None:
        """Drain the routers, then the models; then Ray, if it is ours. What fails is said, and the rest still done."""
        if self._deployed:
            await self._try("cancel what is under way", self._close_catalog())
            await self._try("drain the router", self._drain_routers())
            if not self._owned:
                for name in (*self._models, SERVER):
                    await self._try(f"remove {name}", deploy.in_thread(lambda name=name: deploy.delete(name)))  # type: ignore[misc]
        if self._connected:
            await deploy.in_thread(local.release)

    async def _try(self, what: str, step: Awaitable[None]) -> None:
        try:
            await step
        except Exception as error:  # the cluster may be broken in any way by now
            self._say(f"Could not {what}: {type(error).__name__}: {error}")

    async def _close_catalog(self) -> None:
        async with asyncio.timeout(CLOSE_SECONDS):
            self._models = await self._ask(CATALOG_DEPLOYMENT, "close")

    async def _drain_routers(self) -> None:
        handle = handle_of(ROUTER_DEPLOYMENT, SERVER)
        await handle.broadcast("drain").results_async(timeout_s=self._config.drain_timeout + CLOSE_SECONDS)

    def _abandon(self) -> None:
        from ray import serve

        names = [n for n in deploy.applications() if n == SERVER or n.startswith("model-")]
        for name in names:
            serve.delete(name, _blocking=False)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _free_port(config: ServerConfig) -> int:
    """The port, which nobody else listens on; a free one for 0. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror};"
                f" `ss -ltnp 'sport = :{config.port}'` says who does, --port takes another",
                param="port",
            ) from None
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _only_one(home: Path, config: ServerConfig) -> Iterator[Callable[[ServerConfig], None]]:
    """Hold the home's lock; what is yielded writes down where this daemon serves, for the next one that comes.

    Raises ConfigurationError that names the daemon that has it, and in what its settings differ.
    """
    note = note_of(home)
    with _usable(home):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(home / "daemon.lock", timeout=0, mode=0o600)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigurationError(_other_settings(_read_note(note), config, str(home))) from None

    def announce(listening: ServerConfig) -> None:
        settings = listening.model_dump(mode="json", exclude={"api_key", "admin_key"})
        descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**settings, "pid": os.getpid()}, file)

    try:
        yield announce
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def note_of(home: Path) -> Path:
    """Where a daemon that serves this home has written down its settings."""
    return home / "daemon.json"


def _read_note(note: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(note.read_text())
    except (OSError, ValueError):
        return {}  # it is starting, or stopping
    return settings


def _other_settings(running: dict[str, Any], wanted: ServerConfig, place: str) -> str:
    """One line about the daemon that is there already, and in what it differs from the one wanted."""
    asked = wanted.model_dump(mode="json", exclude={"api_key", "admin_key", "home", "address", "log_dir"})
    differing = [
        f"{name} {running[name]!r} instead of {value!r}"
        for name, value in asked.items()
        if name in running and running[name] != value and (name, value) != ("port", 0)
    ]
    where = f" on {_url(running['host'], running['port'])}" if running else ""
    who = f" (pid {running['pid']})" if "pid" in running else ""
    settings = f", with {', '.join(differing)}" if differing else ", with the same settings" if running else ""
    return f"a daemon already serves {place}{where}{who}{settings}; stop it first"
