"""Two machines on one: network namespaces joined by a cable. By netlink, so that nothing need be installed.

A namespace belongs to a thread, so what is to happen in one runs in a thread that enters it, or in a process whose
first step is to enter it.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
RTM_NEWLINK, RTM_NEWADDR = 16, 20
REQUEST, ACK, CREATE_NEW = 0x1, 0x4, 0x600
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD, IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 3, 18, 28, 1, 2, 1
IFA_ADDRESS, IFA_LOCAL, IFF_UP = 1, 2, 1
CABLE = "cable"

_numbers = itertools.count(1)


def allowed() -> bool:
    """Whether this process may make namespaces: what root may, unless a container took it away."""
    status = Path("/proc/self/status")
    if not status.exists():
        return False
    (held,) = [int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("CapEff:")]
    return all(held >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def in_thread[T](call: Callable[[], T]) -> T:
    """The result of a call on a thread of its own, whose namespace goes with it."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result()


class Machine:
    """A network namespace with loopback and, once it is connected, one address."""

    def __init__(self) -> None:
        def make() -> int:
            os.unshare(os.CLONE_NEWNET)
            _ask(RTM_NEWLINK, _link(socket.if_nametoindex("lo"), IFF_UP))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        self._descriptor = in_thread(make)
        self.address = ""

    def connect(self, other: Machine, own: str, others: str) -> None:
        """A cable between two machines with an address of a /24 at each end."""
        peer = _link(0, 0) + _attribute(IFLA_IFNAME, CABLE.encode() + b"\0")
        peer += _attribute(IFLA_NET_NS_FD, struct.pack("=i", other._descriptor))
        info = _attribute(IFLA_INFO_KIND, b"veth") + _attribute(IFLA_INFO_DATA, _attribute(VETH_INFO_PEER, peer))
        cable = _attribute(IFLA_IFNAME, CABLE.encode() + b"\0") + _attribute(IFLA_LINKINFO, info)
        self.run(lambda: _ask(RTM_NEWLINK, _link(0, 0) + cable, CREATE_NEW))
        for machine, address in ((self, own), (other, others)):
            machine.run(lambda address=address: _settle(address))  # type: ignore[misc]
            machine.address = address

    def run[T](self, call: Callable[[], T]) -> T:
        """The result of a call on this machine: sockets that it opens belong to it."""

        def inside() -> T:
            os.setns(self._descriptor, os.CLONE_NEWNET)
            return call()

        return in_thread(inside)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A process on this machine."""
        return self.run(lambda: subprocess.Popen(command, text=True, **options))

    def close(self) -> None:
        os.close(self._descriptor)


def _settle(address: str) -> None:
    index = socket.if_nametoindex(CABLE)
    packed = socket.inet_aton(address)
    body = struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, index)
    _ask(RTM_NEWADDR, body + _attribute(IFA_LOCAL, packed) + _attribute(IFA_ADDRESS, packed), CREATE_NEW)
    _ask(RTM_NEWLINK, _link(index, IFF_UP))


def _link(index: int, flags: int) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _ask(kind: int, body: bytes, flags: int = 0) -> None:
    """One netlink message and its acknowledgement. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as line:
        line.send(struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACK | flags, next(_numbers), 0) + body)
        code = struct.unpack_from("=i", line.recv(65536), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
