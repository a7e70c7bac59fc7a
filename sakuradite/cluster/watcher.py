"""Runs as a script beside a local Ray: once the process that started it is gone, ends what is left of it.

    python -I -S watcher.py PID FOLDER

Ray's own cleanup ends most of it at once after a kill -9; its agents would stay for a minute and the folder for ever.
Imports nothing but the standard library, and little of that: it costs 8 MB.
"""

import os
import select
import shutil
import signal
import sys
import time


def wait_for_end(pid: int) -> None:
    """Return when the process `pid`, our parent, has ended. A pidfd where there is one, else a look every second."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        while os.getppid() == pid:
            time.sleep(1)
        return
    if os.getppid() == pid:  # else it ended before the pidfd was opened, and the number may be another's already
        select.select([descriptor], [], [])
    os.close(descriptor)


def users_of(folder: str) -> list[int]:
    """Processes of this user that have a file of the folder open or name it on their command line."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                named = folder.encode() in file.read()
            if named or any(_target(entry, fd).startswith(folder + "/") for fd in os.listdir(f"/proc/{entry}/fd")):
                found.append(int(entry))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def _target(process: str, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/fd/{descriptor}")
    except OSError:
        return ""


def clean(folder: str, spared: int = 0) -> None:
    """End the folder's processes but the one spared, then remove it. In rounds: one may be about to start another."""
    for _ in range(20):
        left = [pid for pid in users_of(folder) if pid != spared]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        if not left:
            break
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_end(int(sys.argv[1]))
    time.sleep(1)  # most end by themselves, and write into the folder until they do
    clean(sys.argv[2])
