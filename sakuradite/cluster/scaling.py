"""How many replicas there should be: of a model by the requests that it holds, of routers by the nodes.

Serve asks these functions in its controller, ten times a second, and keeps bounds and delays itself. Its own policy
counts calls, of which one may carry sixty requests.
"""

from __future__ import annotations

import time
from typing import Any

from sakuradite.config import ReplicaRange

PENDING = "pending_requests"
"""The name under which a replica tells how many requests wait or run."""
MAX_LOOK_BACK_SECONDS = 30.0
MAX_REPORT_SECONDS = 10.0
NODES_SECONDS = 2.0
"""Between looks at the nodes."""
MAX_ROUTERS = 10_000


def model_scale(replicas: int | ReplicaRange) -> dict[str, Any]:
    """The arguments of `serve.deployment` for so many replicas of a model."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    look_back = max(1.0, min(MAX_LOOK_BACK_SECONDS, replicas.up_after, replicas.down_after))
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "initial_replicas": max(1, replicas.min),
            "max_replicas": replicas.max,
            "target_ongoing_requests": replicas.target,
            "upscale_delay_s": replicas.up_after,
            "downscale_delay_s": replicas.down_after,
            "look_back_period_s": look_back,
            "metrics_interval_s": min(MAX_REPORT_SECONDS, look_back / 2),
            "policy": {"policy_function": f"{__name__}:by_pending_requests"},
        }
    }


def router_scale(routers: int | str) -> dict[str, Any]:
    """The arguments of `serve.deployment` for so many routers; with "node" one on each node, also on one that joins."""
    if isinstance(routers, int):
        return {"num_replicas": routers}
    nodes = _alive()
    return {
        "max_replicas_per_node": 1,
        "autoscaling_config": {
            "min_replicas": 1,
            "initial_replicas": nodes,
            "max_replicas": MAX_ROUTERS,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": f"{__name__}:one_per_node"},
        },
    }


def by_pending_requests(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's policy for models: requests that wait or run, by how many of them a replica should hold."""
    if context.current_num_replicas == 0:
        return context.target_num_replicas, {}
    pending = sum((context.aggregated_metrics or {}).get(PENDING, {}).values()) + context.total_queued_requests
    return pending / context.config.target_ongoing_requests, {}


def one_per_node(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's policy for routers: the number of live nodes."""
    looked, nodes = context.policy_state.get("nodes", (0.0, 0))
    if time.monotonic() - looked > NODES_SECONDS:
        looked, nodes = time.monotonic(), _alive()
    return float(nodes), {"nodes": (looked, nodes)}


def _alive() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())
