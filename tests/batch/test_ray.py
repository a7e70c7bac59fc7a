"""Bulk jobs on a real Ray: the answers of a client, real processes killed, a real cluster joined."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from sakuradite import APIError, ModelConfig, Sakuradite
from sakuradite.batch import pipeline, run
from sakuradite.hub import smollm2
from tests.batch.conftest import QUESTIONS, read_lines, write_lines
from tests.batch.killing import ROOT, Killing
from tests.cluster.processes import alive, descendants, eventually

pytestmark = pytest.mark.ray
TOLERANCE = 1e-5  # float32: company may move a rounding


def same(found: Any, expected: Any) -> bool:
    """Whether two answers are the same but for rounding."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return bool(found == pytest.approx(expected, abs=TOLERANCE)) if isinstance(found, float) else found == expected


def check_against_client(config: ModelConfig, folder: Path, rows: list[Any]) -> None:
    """Each row's result is what a client of the same model says of it."""
    source = write_lines(folder / "in.jsonl", *rows)
    with Sakuradite(config.model_copy(update={"replicas": 1}), base_url="", home=folder / "home") as client:
        expected = [
            {"error": (row.code, row.message)} if isinstance(row, APIError) else row.model_dump(mode="json")  # type: ignore[union-attr]
            for row in client.decide_many([row["state"] for row in rows], QUESTIONS)
        ]
        summary = run(source, folder / "out.jsonl", QUESTIONS, config, home=folder / "home")  # on the client's Ray
    lines = read_lines(folder / "out.jsonl")
    assert summary.rows == len(lines) == len(rows)
    for i, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
        assert (line["line"], line["row"]) == (i + 1, rows[i])
        if "error" in wanted:
            assert (line["error"]["code"], line["error"]["message"]) == wanted["error"]
        else:
            assert same({key: line[key] for key in ("model", "answers", "usage")}, wanted)
    assert summary.errors == sum("error" in wanted for wanted in expected) > 0


def test_a_row_gets_what_a_client_gets(tiny: Callable[..., Path], tmp_path: Path) -> None:
    states: list[Any] = [f"The parcel of customer {i} is late." * (1 + i % 3) for i in range(60)]
    states += [{"n": [i, None, 1.5]} for i in range(8)] + ["word " * 3000, "", 5]
    config = ModelConfig(model=str(tiny("llama")), backend="torch", device="cpu")
    check_against_client(config, tmp_path, [{"id": i, "state": state} for i, state in enumerate(states)])


def test_ray_data_knows_how_far_a_reader_may_be_ahead() -> None:
    """Its default is 2 under this private name, and what we set there reaches the reader's calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.data import DataContext
        from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

        context = DataContext()
    assert context._max_num_blocks_in_streaming_gen_buffer == 2
    pipeline._set_read_ahead(context, 16)
    options = ActorPoolMapOperator._apply_default_actor_task_remote_args(None, context)
    assert options["_generator_backpressure_num_objects"] == 2 * 16  # a block and its metadata


@pytest.mark.slow
def test_a_real_checkpoint_says_the_same_in_bulk(tmp_path: Path) -> None:
    checkpoint = smollm2.checkpoint(tmp_path)
    states: list[Any] = [f"Order {i}: the box arrived broken and I want my money back." for i in range(20)] + [
        "x " * 9000
    ]
    # In bfloat16 a product made by one thread, as in one of two replicas, is rounded unlike one made by two.
    config = ModelConfig(model=str(checkpoint), backend="torch", device="cpu", dtype="float32", replicas=2)
    check_against_client(config, tmp_path, [{"id": i, "state": state} for i, state in enumerate(states)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_kills_at_random_points_change_nothing(tmp_path: Path) -> None:
    """A replica and twice the whole group; what was written is there in the end, each row once, byte for byte."""
    killing = Killing(tmp_path, rows=1500, seed=int(time.time()))
    whole = killing.undisturbed()
    assert whole.count(b"\n") == 1502
    disturbed = killing.disturbed(1, ("replica",)), killing.disturbed(2, ("group", "all"))
    assert disturbed == (whole, whole), f"seed {killing.seed}"
    assert killing.kills.total() >= 2


def start(folder: Path, *options: str, rows: int = 2000, model: str = "fake?latency=0.02") -> subprocess.Popen[str]:
    """`sakuradite batch` on an input of some rows, with its questions."""
    source = write_lines(folder / "in.jsonl", *({"id": i, "state": f"state {i}"} for i in range(rows)))
    (folder / "q.json").write_bytes(orjson.dumps(QUESTIONS))
    command = ["batch", source, folder / "out.csv", "-q", folder / "q.json", "-m", model, "--backend", "fake"]
    return subprocess.Popen(
        [sys.executable, "-m", "sakuradite", "--home", folder, *map(str, command), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert eventually(lambda: bool(list(tmp_path.glob("out.csv.batch/part-*"))), 90)
    below = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    told, last = errors.splitlines()[-2:]
    assert last == "error: interrupted"
    assert f"what is done is kept in {tmp_path}/out.csv.batch; go on with: sakuradite --home {tmp_path} batch" in told
    assert out == ""
    assert "Traceback" not in errors
    assert eventually(lambda: not alive(below), 60)
    again = start(tmp_path, "--json")
    out, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    summary = orjson.loads(out)
    assert summary["rows"] == 2000 > summary["resumed"] > 0
    assert set(errors.splitlines()) >= {"reading", "starting Ray and loading the model", "writing"}
    assert (tmp_path / "out.csv").read_text().count("\n") == 2001


@pytest.mark.slow
def test_a_row_that_ends_its_replica_is_an_error_of_its_own(tmp_path: Path) -> None:
    process = start(tmp_path, "--json", rows=100, model="fake?crash=state 41")
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 4, errors
    assert orjson.loads(out)["errors"] == 1
    (bad,) = [line for line in (tmp_path / "out.csv").read_text().splitlines() if "inference_failed" in line]
    assert bad.startswith("42,41,state 41,")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("fake?load_error=model_load_failed", 1, "was told to fail its load"),
        ("fake?nonsense=1", 2, "the fake backend has no option 'nonsense'"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(model: str, code: int, said: str, tmp_path: Path) -> None:
    process = start(tmp_path, model=model)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert said in errors.splitlines()[-1]
    assert errors.splitlines()[-1].startswith("error: ")
    assert errors.count("\n") <= 4


CLUSTER = """
import sys
import ray
ray.init(address="local", include_dashboard=False, configure_logging=False, num_cpus=2, _node_ip_address="127.0.0.1")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a running Ray of somebody else's, with two CPUs to schedule."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else the address is taken for another interface's
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.mark.slow
def test_a_cluster_is_joined_and_left_running(cluster: str, tmp_path: Path) -> None:
    process = start(tmp_path, "--address", cluster, "--replicas", "2", "--json", rows=300)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert orjson.loads(out)["rows"] == 300
    too_many = start(tmp_path, "--address", cluster, "--replicas", "9", "--restart", rows=600)
    _, errors = too_many.communicate(timeout=120)
    assert too_many.returncode == 1
    assert "needed 9 x (1 CPU)" in errors.splitlines()[-1]
    nobody = start(tmp_path, "--address", "127.0.0.1:1", "--restart")
    _, errors = nobody.communicate(timeout=60)
    assert nobody.returncode == 2
    assert errors.splitlines()[-1].startswith("error: no Ray cluster at '127.0.0.1:1': ")
