"""Where the nodes of a cluster keep models: each in a home of its own, or all in one that they share.

A replica finds its model in its node's home, or downloads it there; of several that start at once one downloads and the
others wait for it. Nothing is copied from node to node.
"""

from __future__ import annotations

import os
from pathlib import Path

from sakuradite.cluster.resources import NODE_ID_LABEL
from sakuradite.config import ENVIRONMENT, home_directory
from sakuradite.errors import APIError, ErrorRecord, InternalError, ModelNotFoundError, error_from_record

NODE_SECONDS = 60.0
"""For another node to answer: it starts a process for the question."""


def travelling(home: Path) -> str:
    """A home as other nodes are told of it: the default one is each user's own."""
    return "~/.sakuradite" if home == Path.home() / ".sakuradite" else str(home)


def node_home(home: str | None, own: bool = False) -> Path:
    """The home on this node: the one given, or with None and, where nodes have their `own`, first of all the one that
    SAKURADITE_HOME named when this node's Ray was started.
    """
    here = os.environ.get(ENVIRONMENT["home"])
    return home_directory(None if own and here else home)[0]


def node_name() -> str:
    """What Ray calls this node: the name that it was started with, or its address."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next((str(node["NodeName"]) for node in ray.nodes() if node["NodeID"] == here), here)


def remove_everywhere(model: str, home: str) -> None:
    """Delete a checkpoint from the homes of all nodes. Blocks.

    Raises ModelNotFoundError where none has it, and what `Store.remove` raises.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: str(node["NodeName"]) for node in ray.nodes() if node["Alive"] and node["NodeID"] != here}
    # This one first: the others may share its home, and would hold each other up.
    answers = [_remove_here(model, home), *_ask(nodes, model, home)]
    errors = [error for error in answers if error is not None and error.code != ModelNotFoundError.code]
    if errors or None not in answers:
        raise error_from_record(next(error for error in (*errors, *answers) if error is not None))


def _ask(nodes: dict[str, str], model: str, home: str) -> list[ErrorRecord | None]:
    """Each node's answer to `_remove_here`."""
    import ray

    task = ray.remote(num_cpus=0, max_retries=0)(_remove_here)
    asked = {
        task.options(label_selector={NODE_ID_LABEL: node}).remote(model, home): name for node, name in nodes.items()
    }
    done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS) if asked else ([], [])
    if silent:
        names = ", ".join(asked[answer] for answer in silent)
        raise InternalError(f"{names} did not say within {NODE_SECONDS:g} s that {model} is removed there; try again")
    answers: list[ErrorRecord | None] = ray.get(done)
    return answers


def _remove_here(model: str, home: str) -> ErrorRecord | None:
    from sakuradite.hub.store import Store

    try:
        Store(node_home(home, own=True)).remove(model)
    except APIError as error:
        return error.record()
    return None
