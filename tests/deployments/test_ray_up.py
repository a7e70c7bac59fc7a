"""cluster-configs/ray-up: what Ray's own reader of these files says, and what it lets pass."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from sakuradite.cluster.declaration import _Loader
from tests.deployments.test_declaration import keys_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts.scripts import cli

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "cluster-configs" / "ray-up").glob("*.yaml"))
START_OPTIONS = {option for parameter in cli.commands["start"].params for option in parameter.opts}


def strict_schema() -> dict[str, Any]:
    """Ray's schema, which lets anything pass in `provider`; here only what it names, and what local clusters read."""
    schema: dict[str, Any] = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    schema["properties"]["provider"]["additionalProperties"] = False
    return schema


VALIDATOR = Draft7Validator(strict_schema())


def faults(content: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(content)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_reads_the_file(path: Path) -> None:
    content = yaml.load(path.read_text(), _Loader)
    assert faults(content) == []
    prepared = prepare_config(copy.deepcopy(content))
    validate_config(prepared)
    assert prepared["cluster_name"] == "sakuradite"


FREE = {"file_mounts", "node_config", "resources", "labels", "available_node_types"}
"""Mappings whose keys are names or the cloud's own. A node type's own fields are looked at all the same."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_refused_when_it_is_misspelt(path: Path) -> None:
    content = yaml.load(path.read_text(), _Loader)
    for place in keys_of(content):
        named = place[:-1] if place[0] != "available_node_types" or len(place) == 2 else place[2:-1]
        if FREE & set(named):
            continue
        misspelt = copy.deepcopy(content)
        within: Any = misspelt
        for part in place[:-1]:
            within = within[part]
        within[f"{place[-1]}x"] = within.pop(place[-1])
        assert faults(misspelt), place


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_use_options_that_ray_has_and_files_that_are_there(path: Path) -> None:
    content = yaml.load(path.read_text(), _Loader)
    commands = [c for key in content if key.endswith("_commands") for c in content[key]]
    starts = [c for c in commands if "ray start" in c]
    assert len(starts) == 2
    for command in starts:
        assert set(re.findall(r"--[a-z-]+", command)) <= START_OPTIONS
        assert ". ~/.sakuradite-cluster" in command
    assert "-c constraints.txt '.[server,torch]'" in " ".join(commands)
    assert content["file_mounts"] == {"~/source": ".", "~/.sakuradite-cluster": "~/.sakuradite-cluster"}
    assert (ROOT / "constraints.txt").exists()


def test_the_node_types_of_the_cloud_offer_what_the_fleet_asks_for() -> None:
    content = yaml.load((ROOT / "cluster-configs" / "ray-up" / "aws.yaml").read_text(), _Loader)
    assert content["available_node_types"]["gpu"]["resources"] == {"CPU": 4, "GPU": 1}
    assert content["available_node_types"]["gpu"]["node_config"]["MetadataOptions"] == {"HttpTokens": "required"}
    assert content["available_node_types"]["head"]["resources"] == {"CPU": 0}
