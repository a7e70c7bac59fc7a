"""What a model asks of the cluster's scheduler, and which nodes can give it.

Counted per node, because a replica runs on one: four nodes with a GPU each hold no replica of two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sakuradite.config import ModelConfig
from sakuradite.errors import ConfigurationError, InsufficientResourcesError

MAX_NODES_TOLD = 8
"""Nodes that an error names one by one."""
NODE_ID_LABEL = "ray.io/node-id"
REPLICA_NAME = "SERVE_REPLICA::"
MANY = 10_000
"""Replicas that ask for nothing, on one node."""
EPSILON = 1e-6
"""Ray counts resources in ten-thousandths; fractions of a GPU are not exact in a float."""


@dataclass(frozen=True)
class Node:
    """One live machine of the cluster: its name, what it has, what is free of it, and its labels."""

    id: str
    name: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """Replicas: the resources of each, the node labels that they need, how many, and the nodes of those that run."""

    each: dict[str, float]
    placement: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    placed: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on nodes with {_pairs(self.placement)}" if self.placement else ""
        return (f"{self.replicas} x ({_words(self.each)})" if self.replicas > 1 else _words(self.each)) + where


class NoRoomNowError(InsufficientResourcesError):
    """The nodes are large enough, but others have what is asked for."""


def actor_options(config: ModelConfig, gpus: float = 0.0) -> dict[str, Any]:
    """Ray actor options of one replica.

    A CPU model asks for one CPU, CUDA for one GPU, MLX and MPS for one of their resource; what the config names wins.
    With `device="auto"` a torch model asks for a GPU where a node that it may run on has one (`gpus`, the most).
    """
    resources = dict(config.resources)
    num_gpus = config.num_gpus
    if config.backend == "mlx":
        resources.setdefault("MLX", 1.0)
    elif config.device.startswith("mps"):
        resources.setdefault("MPS", 1.0)
    elif num_gpus is None and config.backend != "fake":
        num_gpus = 1.0 if config.device.startswith("cuda") or (config.device == "auto" and gpus >= 1) else 0.0
    options: dict[str, Any] = {
        "num_cpus": 1.0 if config.num_cpus is None else config.num_cpus,
        "num_gpus": num_gpus or 0.0,
    }
    if config.memory is not None:
        options["memory"] = config.memory
    if resources:
        options["resources"] = resources
    if config.placement:
        options["label_selector"] = dict(config.placement)
    return options


def needs(options: dict[str, Any]) -> dict[str, float]:
    """The resources of actor options under the scheduler's names."""
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
    return {name: float(n) for name, n in {**named, **options.get("resources", {})}.items() if n > 0}


def first_replicas(config: ModelConfig) -> int:
    """How many replicas a load starts with."""
    return config.replicas if isinstance(config.replicas, int) else max(1, config.replicas.min)


def check_resources(config: ModelConfig, others: Sequence[Demand] = ()) -> dict[str, Any]:
    """The options of a replica, once the connected cluster can give them to as many as a load starts with. Blocks.

    `others` is what other models were promised: one that has no place yet holds nothing so far, and Ray shows it as
    free. Raises InsufficientResourcesError where no node could ever hold it, NoRoomNowError where one could if less
    were taken, ConfigurationError for a placement that is no selector. What an autoscaler may add a node for passes.
    """
    check_asked(config)
    return fitting_options(config, cluster_nodes(), others, autoscaler_groups())


def fitting_options(
    config: ModelConfig, nodes: Sequence[Node], others: Sequence[Demand] = (), groups: Sequence[Node] = ()
) -> dict[str, Any]:
    """`check_resources` for these nodes, and kinds of node that may be added."""
    fitting = [node for node in nodes if matches(node.labels, config.placement)]
    options = actor_options(config, max((node.total.get("GPU", 0.0) for node in fitting), default=0.0))
    demand = Demand(needs(options), config.placement, first_replicas(config))
    if any(room(demand.each, group.total) for group in groups):
        return options
    if (lacking := never(demand, nodes)) is not None:
        raise InsufficientResourcesError(lacking, param=_field(config, lacking))
    if (lacking := not_now(demand, nodes, others)) is not None:
        raise NoRoomNowError(lacking)
    return options


def possible_nodes(config: ModelConfig, nodes: Sequence[Node]) -> list[Node]:
    """Those that could hold a replica if nothing else ran."""
    fitting = [node for node in nodes if matches(node.labels, config.placement)]
    each = needs(actor_options(config, max((node.total.get("GPU", 0.0) for node in fitting), default=0.0)))
    return [node for node in fitting if room(each, node.total)]


def check_asked(config: ModelConfig) -> None:
    """Raises ConfigurationError for what Ray would refuse, in a process of its own: part of a second GPU, a placement
    that is no label selector.
    """
    from ray._private.label_utils import validate_label_selector

    if config.num_gpus is not None and config.num_gpus > 1 and not config.num_gpus.is_integer():
        raise ConfigurationError(f"num_gpus is {config.num_gpus:g}: above 1 it must be whole", param="num_gpus")
    if (problem := validate_label_selector(config.placement)) is not None:
        raise ConfigurationError(f"placement is no label selector: {problem}", param="placement")


def never(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """A sentence on why these nodes could not hold the replicas even if all else went; None where they could."""
    fitting = [node for node in nodes if matches(node.labels, demand.placement)]
    if not fitting:
        return (
            f"there is no such node: needed {demand}; the nodes are "
            f"{_listed([f'{node.name} ({_pairs(_told(node.labels)) or "no labels"})' for node in nodes])}"
        )
    most = sum(room(demand.each, node.total) for node in fitting)
    if most >= demand.replicas:
        return None
    has = _listed([f"{node.name} {_of(demand, node.total)}" for node in fitting])
    if most == 0:
        return f"no node can hold a replica: needed {demand}, the nodes have {has}"
    return f"the nodes hold {most} of these replicas at most: needed {demand}, the nodes have {has}"


def not_now(demand: Demand, nodes: Sequence[Node], others: Sequence[Demand] = ()) -> str | None:
    """A sentence on what is not free, or None. What `others` were promised comes first, wherever it fits."""
    free = {node.id: _free(node, others) for node in nodes}
    for other in others:
        for _ in range(other.replicas - len(other.placed)):
            for node in nodes:
                if matches(node.labels, other.placement) and room(other.each, free[node.id]):
                    for name, n in other.each.items():
                        free[node.id][name] -= n
                    break
    fitting = [node for node in nodes if matches(node.labels, demand.placement)]
    there = sum(room(demand.each, free[node.id]) for node in fitting)
    if there >= demand.replicas:
        return None
    has = _listed([f"{node.name} {_of(demand, free[node.id])}" for node in fitting])
    few = f" (enough for {there})" if there else ""
    return f"not enough is free: needed {demand}, available {has}{few}; unload a model, or ask for less"


def _free(node: Node, others: Sequence[Demand]) -> dict[str, float]:
    """What is free of a node by Ray's count, which is late by a moment, and by that of the replicas placed there."""
    free = {name: node.free.get(name, 0.0) for name in node.total}
    for name, n in node.total.items():
        taken = sum(other.each.get(name, 0.0) * other.placed.count(node.id) for other in others)
        free[name] = max(0.0, min(free[name], n - taken))
    return free


def room(each: dict[str, float], resources: dict[str, float]) -> int:
    """How many replicas fit into these resources of one node. Several may share a GPU; none is on two halves."""
    rooms = [MANY]
    for name, n in each.items():
        there = resources.get(name, 0.0) + EPSILON
        if name == "GPU" and n < 1:
            rooms.append(int(there) * int((1 + EPSILON) / n) + int((there - int(there)) / n))
        else:
            rooms.append(int(there / n))
    return min(rooms)


def matches(labels: dict[str, str], selector: dict[str, str]) -> bool:
    """Whether a node has the labels, as Ray reads a selector: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    for key, wanted in selector.items():
        names = wanted.removeprefix("!").removeprefix("in").strip("()") if wanted.endswith(")") else wanted.strip("!")
        among = labels.get(key) in [name.strip() for name in names.split(",")]
        if among == wanted.startswith("!"):
            return False
    return True


def cluster_nodes() -> list[Node]:
    """The live nodes of the connected cluster by name, and what is free on each."""
    import ray

    free = ray._private.state.available_resources_per_node()
    return sorted(
        (
            Node(node["NodeID"], node["NodeName"], node["Resources"], free.get(node["NodeID"], {}), node["Labels"])
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda node: node.name,
    )


def autoscaler_groups() -> list[Node]:
    """The kinds of node that an autoscaler may add, empty where there is none (Ray's own state; a test watches it)."""
    from ray._private.state import state

    config = state.get_cluster_config()
    groups = [] if config is None else [group for group in config.node_group_configs if group.max_count != 0]
    return [Node(g.name, g.name, {n: float(v) for n, v in g.resources.items()}, {}) for g in groups]


def replica_nodes() -> dict[str, tuple[str, ...]]:
    """By Serve application, the ids of the nodes that its replicas run or start on: of those that have their place.

    By Serve's names for replicas and Ray's own list of actors; a test watches both. Blocks.
    """
    import ray

    found: dict[str, tuple[str, ...]] = {}
    for actor in ray._private.state.actors().values():
        name, _, _ = actor["Name"].partition("#")
        if name.startswith(REPLICA_NAME) and actor["State"] != "DEAD" and actor["Address"]["IPAddress"]:
            application = name.removeprefix(REPLICA_NAME)
            found[application] = (*found.get(application, ()), actor["Address"]["NodeID"])
    return found


def _field(config: ModelConfig, lacking: str) -> str | None:
    if "no such node" in lacking:
        return "placement"
    return "device" if "GPU" in lacking and config.num_gpus is None else None


def _told(labels: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in sorted(labels.items()) if key != NODE_ID_LABEL}


def _pairs(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _listed(items: list[str]) -> str:
    more = len(items) - MAX_NODES_TOLD
    return "; ".join(items[:MAX_NODES_TOLD] + ([f"and {more} more"] if more > 0 else [])) or "none"


def _of(demand: Demand, resources: dict[str, float]) -> str:
    return _words({name: resources.get(name, 0.0) for name in demand.each})


def _words(amounts: dict[str, float]) -> str:
    words = (f"{n / (1 << 30):.1f} GiB memory" if k == "memory" else f"{n:g} {k}" for k, n in amounts.items())
    return ", ".join(words) or "nothing"
