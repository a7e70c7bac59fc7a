"""What a replica asks for and which nodes can give it: no Ray in it."""

from __future__ import annotations

from typing import Any

import pytest

from sakuradite.cluster.resources import (
    Demand,
    Node,
    NoRoomNowError,
    actor_options,
    fitting_options,
    matches,
    needs,
    room,
)
from sakuradite.config import ModelConfig
from sakuradite.errors import InsufficientResourcesError

CPUS = Node("1", "alpha", {"CPU": 4, "memory": 4 << 30}, {"CPU": 4, "memory": 4 << 30}, {"zone": "a"})
GPUS = Node("2", "beta", {"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2}, {"zone": "b", "gpu": "h100"})
MORE = Node("3", "gamma", {"CPU": 8, "GPU": 1, "MLX": 1}, {"CPU": 8, "MLX": 1}, {"zone": "b"})
NODES = [CPUS, GPUS, MORE]


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model": "m", "device": "cpu", **fields})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"device": "cpu"}, {"CPU": 1}),
        ({"device": "cpu", "num_cpus": 4, "memory": 5}, {"CPU": 4, "memory": 5}),
        ({"device": "cuda"}, {"CPU": 1, "GPU": 1}),
        ({"device": "cuda:1", "num_gpus": 0.25}, {"CPU": 1, "GPU": 0.25}),
        ({"device": "auto"}, {"CPU": 1, "GPU": 1}),
        ({"device": "auto", "backend": "fake"}, {"CPU": 1}),
        ({"backend": "mlx"}, {"CPU": 1, "MLX": 1}),
        ({"backend": "mlx", "resources": {"MLX": 0.5}}, {"CPU": 1, "MLX": 0.5}),
        ({"device": "mps"}, {"CPU": 1, "MPS": 1}),
    ],
)
def test_what_a_replica_asks_for(fields: dict[str, Any], wanted: dict[str, float]) -> None:
    assert needs(actor_options(config(**fields), gpus=2)) == wanted


@pytest.mark.parametrize(("zone", "gpus"), [("a", 0), ("b", 1)])
def test_auto_asks_for_a_gpu_where_the_nodes_that_may_be_used_have_one(zone: str, gpus: int) -> None:
    options = fitting_options(config(device="auto", placement={"zone": zone}), NODES)
    assert (options["num_gpus"], options["label_selector"]) == (gpus, {"zone": zone})


@pytest.mark.parametrize(
    ("fields", "nodes", "words"),
    [
        ({}, NODES, None),
        ({"num_gpus": 2}, NODES, None),
        (
            {"num_gpus": 3}, NODES,
            "no node can hold a replica: needed 1 CPU, 3 GPU, the nodes have alpha 4 CPU, 0 GPU; beta 8 CPU, 2 GPU; "
            "gamma 8 CPU, 1 GPU",
        ),
        (
            {"num_gpus": 1, "replicas": 3}, NODES,
            "not enough is free: needed 3 x (1 CPU, 1 GPU), available alpha 4 CPU, 0 GPU; beta 8 CPU, 2 GPU; "
            "gamma 8 CPU, 0 GPU (enough for 2)",
        ),
        ({"num_gpus": 1, "replicas": 4}, NODES, "hold 3 of these replicas at most: needed 4 x (1 CPU, 1 GPU)"),
        ({"num_cpus": 5, "replicas": 2}, NODES, None),
        ({"num_cpus": 5, "replicas": 3}, NODES, "hold 2 of these replicas"),
        ({"num_cpus": 9}, NODES, "needed 9 CPU"),
        ({"num_cpus": 5, "placement": {"zone": "a"}}, NODES, "5 CPU on nodes with zone=a, the nodes have alpha 4 CPU"),
        (
            {"placement": {"zone": "c"}}, NODES,
            "no such node: needed 1 CPU on nodes with zone=c; the nodes are alpha (zone=a); "
            "beta (gpu=h100, zone=b); gamma (zone=b)",
        ),
        ({"placement": {"zone": "b", "gpu": "!in(h100, a100)"}, "backend": "mlx"}, NODES, None),
        ({"placement": {"zone": "b", "gpu": "h100"}, "backend": "mlx"}, NODES, "needed 1 CPU, 1 MLX on nodes"),
        ({"num_gpus": 0.5, "replicas": 4}, NODES, None),
        ({"num_gpus": 0.4, "replicas": 7}, NODES, "hold 6 of these replicas at most: needed 7 x (1 CPU, 0.4 GPU)"),
        ({"num_gpus": 0.3, "replicas": 6}, NODES, None),
        ({"memory": 8 << 30}, NODES, "needed 1 CPU, 8.0 GiB memory, the nodes have alpha 4 CPU, 4.0 GiB memory; beta"),
        ({"resources": {"TPU": 1}}, NODES, "1 TPU"),
        ({"num_cpus": 0, "replicas": 50}, NODES, None),
        ({}, [], "no such node"),
        ({"num_cpus": 9}, [Node(str(n), f"n{n}", {"CPU": 1}, {}) for n in range(20)], "n7 1 CPU; and 12 more"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_per_node(fields: dict[str, Any], nodes: list[Node], words: str | None) -> None:
    if words is None:
        assert fitting_options(config(**fields), nodes)
        return
    with pytest.raises(InsufficientResourcesError) as refused:
        fitting_options(config(**fields), nodes)
    assert words in refused.value.message
    assert isinstance(refused.value, NoRoomNowError) == ("not enough is free" in words)


@pytest.mark.parametrize(
    ("others", "fits"),
    [
        ([], True),
        ([Demand({"GPU": 1})], True),  # has no place yet, and one is left
        ([Demand({"GPU": 1}, replicas=2)], False),
        ([Demand({"GPU": 1}, {"zone": "a"}, 2)], True),  # they wait for another node
        ([Demand({"GPU": 1}, replicas=2, placed=("2", "9"))], True),  # the other one holds what is not ours
        ([Demand({"GPU": 1}, replicas=2, placed=("2", "2"))], False),  # there already, though Ray counts it as free
        ([Demand({"GPU": 5}, replicas=2)], True),  # it fits nowhere, so it takes nothing
        ([Demand({"CPU": 8}, {"gpu": "h100"})], False),
    ],
)
def test_what_was_promised_to_others_is_not_free(others: list[Demand], fits: bool) -> None:
    asked = config(num_gpus=1, device="cuda")
    if fits:
        assert fitting_options(asked, NODES, others)
    else:
        with pytest.raises(NoRoomNowError, match=r"available .*beta (8|0) CPU, (0|2) GPU"):
            fitting_options(asked, NODES, others)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"CPU": 8, "GPU": 8}, None),
        ({"CPU": 8}, InsufficientResourcesError),
    ],
)
def test_what_an_autoscaler_may_add_a_node_for_is_allowed(group: dict[str, float], error: Any) -> None:
    asked, groups = config(device="cuda", num_gpus=4), [Node("g", "g", group, {})]
    if error is None:
        assert fitting_options(asked, NODES, groups=groups)["num_gpus"] == 4
    else:
        with pytest.raises(error, match="no node can hold"):
            fitting_options(asked, NODES, groups=groups)


@pytest.mark.parametrize(
    ("resources", "gpus", "fit"),
    [(2, 1, 2), (2, 0.5, 4), (2, 0.4, 4), (1.5, 0.4, 3), (1.5, 1, 1), (0.3, 0.1, 3), (1, 1 / 3, 3), (4, 2, 2)],
)
def test_fractions_of_a_gpu(resources: float, gpus: float, fit: int) -> None:
    assert room({"GPU": gpus}, {"GPU": resources}) == fit


@pytest.mark.parametrize(
    ("selector", "labels", "found"),
    [
        ("a", {"zone": "a"}, True),
        ("a", {"zone": "b"}, False),
        ("a", {}, False),
        ("!a", {"zone": "b"}, True),
        ("!a", {"zone": "a"}, False),
        ("!a", {}, True),
        ("in(a, b)", {"zone": "b"}, True),
        ("in(a,b)", {"zone": "c"}, False),
        ("!in(a, b)", {"zone": "b"}, False),
        ("!in(a, b)", {}, True),
        ("in", {"zone": "in"}, True),
        ("inner", {"zone": "inner"}, True),
    ],
)
def test_label_selectors(selector: str, labels: dict[str, str], found: bool) -> None:
    assert matches(labels, {"zone": selector}) == found
