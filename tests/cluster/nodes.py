"""Several Ray nodes on this machine, each with an address of loopback, labels and resources of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, logging, os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
import ray
from ray.cluster_utils import Cluster
from sakuradite.cluster.resources import replica_nodes

cluster, names, running = Cluster(), {}, {}

def add(number, node):
    address = f"127.0.0.{number + 1}"
    running[address] = cluster.add_node(node_ip_address=address, include_dashboard=False, **node)
    names[running[address].node_id] = address

for number, node in enumerate(json.loads(sys.argv[1])):
    add(number, {**node, **({"temp_dir": sys.argv[2]} if number == 0 else {})})
ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
print("@" + cluster.address, flush=True)
for line in sys.stdin:
    command, _, rest = line.strip().partition(" ")
    if command == "add":
        add(len(names), json.loads(rest))
    elif command == "remove":
        cluster.remove_node(running[rest], allow_graceful=False)
    found = {app: sorted(names[id_] for id_ in ids) for app, ids in replica_nodes().items()}
    print("@" + json.dumps(found), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class Nodes:
    """A cluster of nodes in a process of its own; the n-th has the address 127.0.0.n, the first is the head."""

    def __init__(self, temp: Path, nodes: list[dict[str, Any]], **environment: str) -> None:
        """`nodes` are arguments of `ray.cluster_utils.Cluster.add_node`. `temp` has to be short, for sockets."""
        self.environment: dict[str, str | None] = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
        }
        variables = {**os.environ, **self.environment, **environment, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(nodes), str(temp)],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.address = self._line()
        assert self.address, "the cluster did not start"

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.communicate(timeout=60)

    def ask(self, command: str = "where") -> dict[str, list[str]]:
        """By Serve application the addresses of its replicas, after `add {...}` or `remove ADDRESS` was done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer: dict[str, list[str]] = json.loads(self._line())
        return answer

    def replicas(self, model: str) -> list[str]:
        """The addresses of the replicas of the model whose application's name begins so."""
        return sorted(address for app, found in self.ask().items() if app.startswith(model) for address in found)

    def _line(self) -> str:
        """The next line of the program itself: Ray writes some of its own about nodes that die."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        return ""
