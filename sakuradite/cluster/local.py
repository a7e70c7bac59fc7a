"""The Ray of this process: started here on loopback and private, or the one this process had already initialised.

All embedded clients of a process share it, by count. It is gone when the last one lets go; a joined Ray is left
running. What Ray needs from the environment is set while it starts and put back afterwards.
Long because starting, joining, holding and ending it change one state under one lock.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sakuradite.cluster.watcher import clean
from sakuradite.errors import ConfigurationError, MissingExtraError

MAX_TEMP_PATH = 40
"""Bytes of the temporary folder's path: Ray adds 63 to it for its socket, and a Unix socket's path ends at 107."""

MAX_PLACE = MAX_TEMP_PATH - len("/skd12345678/ray")
"""Bytes of what TMPDIR may name."""

OBJECT_STORE_BYTES = 200 << 20
"""Of address space, touched only by requests over the gRPC limit. Ray's own minimum is 75 MiB."""
MIN_OBJECT_STORE_BYTES = 78 << 20

_log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
SIGTERM_SECONDS = 0.01
LOOPBACK = "127.0.0.1"
NAMESPACE = "sakuradite"

SERVE_ENVIRONMENT = {
    # One event loop for Serve's gRPC server, the handles and our own code: a hop between loops costs 0.5-1 ms a call.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""What the processes of our deployments need in their environment before they import Serve."""


@dataclass
class _Local:
    """The state of this process, guarded by `lock`. `pid` tells a forked child that none of it is its own."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    pid: int = 0
    holders: int = 0
    owned: bool = False
    disconnect: bool = False
    temp: Path | None = None
    thread: _RayThread | None = None
    watcher: subprocess.Popen[bytes] | None = None
    gcs: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


_local = _Local()


@dataclass(frozen=True)
class Hold:
    """One client's share of the process's Ray. `owned` is False where the Ray was somebody else's already.

    `seconds` has the phases of the start: imports, ray, serve (zero where nothing had to be started).
    """

    owned: bool
    seconds: dict[str, float]


def acquire(logs: bool = False, cluster: bool = False, serve: bool = True) -> Hold:
    """Start this process's Ray and Serve, or share what is there. Blocks; any thread may call it.

    `cluster` is for the daemon: models are scheduled by what they ask for, and one that asks for no GPU sees none.
    `serve=False` is for work without deployments. `logs` prints the workers' output in the terminal. Interrupted by
    Ctrl-C it stops what it started and raises KeyboardInterrupt. Raises MissingExtraError without ray,
    ConfigurationError where no folder is short enough.
    """
    with _local.lock:
        if _local.pid != os.getpid():
            _reset()
        if _local.holders and _local.owned and not _ray_initialized():
            _discard()  # somebody called ray.shutdown() under us
        if _local.holders == 0:
            try:
                _start(logs, cluster, serve)
            except BaseException:
                _discard()
                raise
        elif serve:
            run_in_ray_thread(start_serve)  # the first holder may have had no need of it
        _local.holders += 1
        return Hold(_local.owned, dict(_local.seconds))


def join(address: str, purpose: str = "The daemon", extra: str = "server", serve: bool = True) -> None:
    """Connect this process to a running Ray cluster and hold it; `release` leaves the cluster as it was.

    Raises ConfigurationError when there is none, MissingExtraError without ray.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError(purpose, extra) from None
    with _local.lock:
        if _local.pid != os.getpid():
            _reset()
        try:
            _check_reachable(address)
            _hush(True)
            with _quiet("ray"), _same_sigterm():
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except Exception as error:
            _hush(False)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigurationError(f"no Ray cluster at {address!r}: {reason}", param="address") from None
        _local.disconnect, _local.gcs = True, ray.get_runtime_context().gcs_address
        if serve:
            start_serve()
        _local.holders += 1


def _check_reachable(address: str) -> None:
    """Raises OSError within seconds where nothing listens: Ray itself tries for minutes."""
    from ray._private import services

    if "://" in address:
        raise OSError("an address is HOST:PORT of the cluster's GCS, or auto; Ray Client is not supported")
    host, _, port = str(services.canonicalize_bootstrap_address(address, None)).rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
        pass


def node_id() -> str:
    """The Ray node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def release() -> None:
    """Give one share back; with the last one an owned Ray and all its processes are gone. Blocks for about a second."""
    with _local.lock:
        if _local.pid != os.getpid() or _local.holders == 0:
            return
        _local.holders -= 1
        if _local.holders == 0:
            _discard()


def is_gone() -> bool:
    """Whether the connected Ray has ended under us: its GCS, or the raylet of an owned one. Hardly a call of Ray's ends
    then, and after a minute Ray aborts the process. Asks Ray nothing; blocks for a second at most. False without a Ray.
    """
    return bool(_local.gcs) and (_gcs_is_gone(_local.gcs) or (_local.owned and _raylet_is_gone()))


def _gcs_is_gone(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # slow is not gone
    return False


def _raylet_is_gone() -> bool:
    """By a private attribute of Ray's; a test watches."""
    node = sys.modules["ray"]._private.worker._global_node
    return node is not None and any(info.process.poll() is not None for info in node.all_processes["raylet"])


def abandon() -> None:
    """Kill the processes of an owned Ray and remove its folder, asking Ray nothing: this process has to end next.

    Takes no lock: whoever starts or stops Ray at this moment may hold it for a minute. What is started meanwhile is
    left to the watcher.
    """
    if _local.temp is not None:
        clean(str(_local.temp), spared=0 if _local.watcher is None else _local.watcher.pid)


def is_last() -> bool:
    """Whether the next `release` stops an owned Ray."""
    return _local.owned and _local.holders == 1


def temp_directory() -> Path | None:
    """Where the owned Ray keeps its sessions and logs; None when there is none."""
    return _local.temp


def run_in_ray_thread[T](call: Callable[[], T]) -> T:
    """Run a blocking call of Ray's on the thread that lives as long as the owned Ray; inline where it is joined."""
    thread = _local.thread
    return call() if thread is None else thread.run(call)


def _ray_initialized() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _reset() -> None:
    """Forget what there was; after a fork none of it belongs to this process."""
    _local.pid, _local.holders, _local.owned, _local.disconnect = os.getpid(), 0, False, False
    _local.temp = _local.thread = _local.watcher = None
    _local.gcs, _local.seconds = "", {}


def _start(logs: bool, cluster: bool, serve: bool) -> None:
    clock = time.perf_counter()
    _local.seconds = {"imports": 0.0, "ray": 0.0, "serve": 0.0}
    if _ray_initialized():
        _local.owned = False
        if serve:
            start_serve()
        _local.seconds["serve"] = time.perf_counter() - clock
        return
    _local.owned = True
    _local.temp = _short_temporary_directory()
    _local.watcher = _start_watcher(_local.temp)
    _local.thread = _RayThread()
    _local.thread.run(lambda: _start_ray(logs, cluster, serve))


def _start_ray(logs: bool, cluster: bool, serve: bool) -> None:
    clock = time.perf_counter()
    assert _local.temp is not None
    with _environment(_ray_environment(_local.temp, cluster)):
        try:
            import ray
        except ImportError:
            raise MissingExtraError("Embedded use", "torch") from None
        _hush(not logs)
        with _quiet("ray"), _same_sigterm(), _ray_imported_before():
            _local.seconds["imports"] = time.perf_counter() - clock
            clock = time.perf_counter()
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=logs,
                configure_logging=False,
                namespace=NAMESPACE,
                object_store_memory=_object_store_bytes(),
                resources=_own_resources() if cluster else None,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(_local.temp / "ray"),  # Ray opens this one to everybody, so it lies in one that is ours
            )
        _local.gcs = ray.get_runtime_context().gcs_address
        atexit.register(_discard_at_exit)  # after ray's own import, so that it runs before ray's own hook
        _local.seconds["ray"] = time.perf_counter() - clock
        clock = time.perf_counter()
        if serve:
            start_serve()
        _local.seconds["serve"] = time.perf_counter() - clock


def start_serve() -> None:
    """Start Serve without its proxies on the connected Ray, unless it runs already.

    On a joined Ray it stays: shutting it down makes Ray print two lines about it to the user's stdout.
    """
    _keep_grpc_off_proxies()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Ray's own modules, fatal under `python -W error`
        from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it tells of every start and stop on stderr
    if not serve_is_running():
        serve.start(proxy_location="Disabled")


def serve_is_running() -> bool:
    """Whether the connected Ray has a Serve controller. Starts nothing (`serve.status()` would)."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _discard() -> None:
    """Stop what this process started."""
    thread, temp, watcher = _local.thread, _local.temp, _local.watcher
    disconnect = _local.disconnect
    _reset()
    if thread is not None:
        thread.run(_stop_ray)
        thread.stop()
    if disconnect and _ray_initialized():
        sys.modules["ray"].shutdown()
        _hush(False)
    if watcher is not None:
        watcher.terminate()
        watcher.wait()
    if temp is not None:
        shutil.rmtree(temp, ignore_errors=True)
    atexit.unregister(_discard_at_exit)


def _discard_at_exit() -> None:
    if _local.pid == os.getpid():
        _discard()


def _stop_ray() -> None:
    import ray

    with _quiet("ray"):
        if _ray_initialized():
            ray.shutdown()
        _hush(False)
        _forget_token()


def _short_temporary_directory() -> Path:
    """A fresh folder of ours alone whose path leaves room for Ray's socket names."""
    if (place := short_place()) is not None:
        return Path(tempfile.mkdtemp(prefix="skd", dir=place))
    raise ConfigurationError(
        f"Ray's sockets need a writable folder whose path has at most {MAX_PLACE} bytes;"
        f" {tempfile.gettempdir()} has {len(os.fsencode(tempfile.gettempdir()))}. Set TMPDIR to a shorter one."
    )


def short_place() -> str | None:
    """The first writable place for temporary folders whose path is short enough: TMPDIR, else /tmp, else /var/tmp."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(place)) <= MAX_PLACE and os.access(place, os.W_OK | os.X_OK):
            return place
    return None


def _object_store_bytes() -> int:
    """Small, and within half of the shared memory, which containers often limit to 64 MiB: that is told in a line."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return OBJECT_STORE_BYTES
    if free < MIN_OBJECT_STORE_BYTES:  # Ray itself would say so in five lines, which `_quiet` keeps back
        _log.warning(
            "/dev/shm has %d MB free and Ray wants %d: requests of many megabytes go through files, more slowly"
            " (in a container: --shm-size=1g)",
            free // 10**6,
            MIN_OBJECT_STORE_BYTES // 10**6,
        )
    return max(MIN_OBJECT_STORE_BYTES, min(OBJECT_STORE_BYTES, free // 2))


def _ray_environment(temp: Path, cluster: bool) -> dict[str, str | None]:
    """For Ray's processes alone. None means unset."""
    token = temp / "token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(os.urandom(32).hex())
    environment: dict[str, str | None] = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": None,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds loopback, on Linux too
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_RUNTIME_ENV_HOOK": None,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would end our model when other programs fill the memory
        # Nobody is told its port for metrics, and unless that is scraped Ray keeps the gauges of every process.
        # /metrics of the routers needs none of it.
        "RAY_enable_metrics_collection": os.environ.get("RAY_enable_metrics_collection", "0"),  # noqa: SIM112
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # else gRPC remarks on every later fork of the program on its stderr
        **SERVE_ENVIRONMENT,
    }
    if cluster:
        environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"  # else a model without a GPU would see every GPU
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = _with_loopback(os.environ.get(name, ""))
    if (os.cpu_count() or 1) > 4:
        # Ray would start one idle Python per core; two or three are of use.
        environment["RAY_prestart_worker_first_driver"] = "0"
    package = str(Path(__file__).parents[2])
    if "site-packages" not in package:  # a checkout: Ray's workers start elsewhere
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return environment


@contextmanager
def _ray_imported_before() -> Iterator[None]:
    """What Ray read from the environment when it was imported, perhaps by the program itself and long ago: told again.

    Private names of Ray's; tests/cluster/test_process.py watches them.
    """
    import ray._raylet
    from ray._private import ray_constants

    constants: Any = ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    raylet: Any = ray._raylet
    raylet.Config.initialize('{"AUTH_MODE": "token"}')
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _own_resources() -> dict[str, float]:
    """One MLX and one MPS where this machine can run them: what `load` asks for is then there."""
    resources = {"MLX": 1.0} if find_spec("mlx") else {}
    if sys.platform == "darwin" and platform.machine() == "arm64":
        resources["MPS"] = 1.0
    return resources


def _with_loopback(hosts: str) -> str:
    present = [host for host in hosts.split(",") if host]
    return ",".join([*present, *(h for h in (LOOPBACK, "localhost", "::1") if h not in present)])


def _keep_grpc_off_proxies() -> None:
    """gRPC would send a replica's loopback calls to the proxy of `http_proxy`; its own variable spares other users."""
    if any(os.environ.get(name) for name in ("http_proxy", "https_proxy", "grpc_proxy")):
        own = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")  # noqa: SIM112
        os.environ["no_grpc_proxy"] = _with_loopback(own)  # noqa: SIM112


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Ray tells of its own start on stderr even when told not to: below an error nothing of it reaches the terminal."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _hush(silent: bool) -> None:
    """Keep from stdout what Ray's driver prints of workers that died, `log_to_driver=False` or not.

    It looks the printing function up in its module each time (a private one; a test watches it).
    """
    from ray._private import worker

    if silent and not hasattr(worker, "_sakuradite_print"):
        worker._sakuradite_print, worker.print_to_stdstream = worker.print_to_stdstream, lambda *_, **__: None
    elif not silent and hasattr(worker, "_sakuradite_print"):
        worker.print_to_stdstream = worker._sakuradite_print
        del worker._sakuradite_print


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Put back the process's handling of SIGTERM: Ray's C++ replaces it by one that prints a stack to stderr first.

    By libc, because Python sets signal handlers on the main thread alone; and again and again, because Ray starts for
    a second or two more after it has replaced it.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(512)  # a struct sigaction, larger than on any platform, never looked into
    libc.sigaction(signal.SIGTERM, None, before)
    ended = threading.Event()

    def put_back() -> None:
        while not ended.wait(SIGTERM_SECONDS):
            libc.sigaction(signal.SIGTERM, before, None)

    keeper = threading.Thread(target=put_back, name="sakuradite-sigterm", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        libc.sigaction(signal.SIGTERM, before, None)


def _forget_token() -> None:
    """Ray caches the token in this process; a later `ray.init` of the user's is to find its own."""
    import ray._raylet

    loader: Any = ray._raylet
    loader.AuthenticationTokenLoader.instance().reset_cache()


def _start_watcher(temp: Path) -> subprocess.Popen[bytes]:
    """A few megabytes of Python that outlive us for as long as it takes to clean up after a kill -9."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("watcher.py")), str(os.getpid()), str(temp)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class _RayThread:
    """The thread that starts and stops an owned Ray.

    Linux kills Ray's processes when the *thread* that started them ends, so this one lives as long as they do. On a
    thread of its own Ray also leaves the program's SIGTERM handler alone.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sakuradite-ray", daemon=True)
        self._thread.start()

    def run[T](self, call: Callable[[], T]) -> T:
        """The result of the call. Ctrl-C in the caller's wait is raised there; the call itself goes on to its end."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future.result()

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, call, future
