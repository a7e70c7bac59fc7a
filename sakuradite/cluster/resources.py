"""What a model asks of the cluster's scheduler, and whether the cluster has it."""

from __future__ import annotations

from typing import Any

from sakuradite.config import ModelConfig
from sakuradite.errors import InsufficientResourcesError


def actor_options(config: ModelConfig, cluster: dict[str, float] | None = None) -> dict[str, Any]:
    """Ray actor options of one replica.

    A CPU model asks for one CPU, CUDA for one GPU, MLX and MPS for one of their resource; what the config names wins.
    With `device="auto"` a torch model asks for a GPU where the cluster (its total resources) has one.
    """
    resources = dict(config.resources)
    num_gpus = config.num_gpus
    if config.backend == "mlx":
        resources.setdefault("MLX", 1.0)
    elif config.device.startswith("mps"):
        resources.setdefault("MPS", 1.0)
    elif num_gpus is None and config.backend != "fake":
        wants = config.device.startswith("cuda")
        num_gpus = 1.0 if wants or (config.device == "auto" and (cluster or {}).get("GPU", 0) >= 1) else 0.0
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


def check_resources(config: ModelConfig, promised: dict[str, float] | None = None) -> dict[str, Any]:
    """The options of a replica, once the connected cluster can give them to as many replicas as are wanted at least.

    `promised` is what the other models were told they get: a replica that is not scheduled yet holds nothing so far,
    and Ray shows it as free. Raises InsufficientResourcesError that says what is needed and what there is. Where an
    autoscaler may add nodes nothing is refused.
    """
    import ray

    total = ray.cluster_resources()
    options = actor_options(config, total)
    if not _autoscaler_may_help():
        wanted = needs(options)
        free = unpromised(ray.available_resources(), total, promised or {})
        lacking = shortfall(wanted, first_replicas(config), _nodes(config.placement), free)
        if lacking is not None:
            raise InsufficientResourcesError(lacking, param="device" if "GPU" in lacking else None)
    return options


def first_replicas(config: ModelConfig) -> int:
    """How many replicas a load starts with."""
    return config.replicas if isinstance(config.replicas, int) else max(1, config.replicas.min)


def unpromised(available: dict[str, float], total: dict[str, float], promised: dict[str, float]) -> dict[str, float]:
    """What is free for one more: neither taken (by whomever) nor promised to others."""
    return {name: min(n, total.get(name, 0.0) - promised.get(name, 0.0)) for name, n in available.items()}


def needs(options: dict[str, Any]) -> dict[str, float]:
    """The resources of actor options under the scheduler's names."""
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
    return {name: float(n) for name, n in {**named, **options.get("resources", {})}.items() if n > 0}


def shortfall(
    wanted: dict[str, float], replicas: int, nodes: list[dict[str, float]], available: dict[str, float]
) -> str | None:
    """A sentence on what is missing, or None. `nodes` are the total resources of each node that may be used.

    One replica has to fit on a node, all replicas into what is free now.
    """
    asked = _words(wanted, replicas)
    if not any(all(node.get(name, 0) >= n for name, n in wanted.items()) for node in nodes):
        has = "; ".join(_words({name: node.get(name, 0.0) for name in wanted}) for node in nodes) or "no such node"
        return f"no node can hold a replica: needed {asked}, the nodes have {has}"
    free = {name: available.get(name, 0.0) for name in wanted}
    if any(n * replicas > free[name] for name, n in wanted.items()):
        return f"not enough is free: needed {asked}, available {_words(free)}"
    return None


def _words(amounts: dict[str, float], replicas: int = 1) -> str:
    each = ", ".join(
        f"{n / (1 << 30):.1f} GiB memory" if name == "memory" else f"{n:g} {name}" for name, n in amounts.items()
    )
    return f"{replicas} x ({each})" if replicas > 1 else each or "nothing"


def _nodes(placement: dict[str, str]) -> list[dict[str, float]]:
    """Total resources of the live nodes; of those with the labels, where labels are asked for by plain equality."""
    import ray

    plain = {key: value for key, value in placement.items() if not value.startswith(("!", "in(", "!in("))}
    return [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and all(node.get("Labels", {}).get(key) == value for key, value in plain.items())
    ]


def _autoscaler_may_help() -> bool:
    """Whether an autoscaler that can start nodes has told Ray its configuration (Ray's own state)."""
    from ray._private.state import state

    config = state.get_cluster_config()
    return config is not None and any(group.max_count != 0 for group in config.node_group_configs)
