"""The embedded model on the Ray of this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sakuradite.cluster import deploy, local
from sakuradite.cluster.application import model_application
from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.errors import APIError, InvalidLifecycleError
from tests.cluster.asking import answers, request
from tests.cluster.processes import descendants, eventually, listeners, name

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def config(model: str = "fake", **more: object) -> ModelConfig:
    return ModelConfig.model_validate({"model": model, "backend": "fake", **more})


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[EmbeddedModel]:
    running = EmbeddedModel(config(), tmp_path)
    await running.start()
    yield running
    await running.close()


async def test_answers_are_those_of_the_engine_in_this_process(model: EmbeddedModel) -> None:
    engine = Engine(config(), None)
    await engine.start()
    for text in ("one", "two", "Привет\n" * 200):
        assert await answers(model, request(text)) == await answers(engine, request(text))
    await engine.stop(0)
    assert model.capabilities is not None
    assert model.capabilities.backend == "fake"
    assert set(model.seconds) == {"imports", "ray", "serve", "model"}


async def test_two_clients_at_once_and_one_leaves(model: EmbeddedModel, tmp_path: Path) -> None:
    other = EmbeddedModel(config("fake?layout=padded"), tmp_path)
    await other.start()
    both = await asyncio.gather(answers(model, request()), answers(other, request()))
    assert both[0] == both[1]
    await other.close()
    assert await answers(model, request()) == both[0]


async def test_a_closed_model_stays_closed(tmp_path: Path) -> None:
    model = EmbeddedModel(config(), tmp_path)
    with pytest.raises(InvalidLifecycleError, match="not open"):
        model.decide(request())
    await model.start()
    with pytest.raises(InvalidLifecycleError, match="opened once"):
        await model.start()
    await model.close()
    await model.close()
    with pytest.raises(InvalidLifecycleError, match="closed"):
        model.decide(request())
    with pytest.raises(InvalidLifecycleError, match="opened once"):
        await model.start()


@pytest.mark.parametrize(
    ("model", "more", "code", "words"),
    [
        ("fake?load_error=unsupported_model", {}, "unsupported_model", "told to fail"),
        ("fake?load_error=model_load_failed", {}, "model_load_failed", "told to fail"),
        ("fake?nonsense=1", {}, "configuration_error", "nonsense"),
        ("fake", {"device": "cuda"}, "insufficient_resources", "cuda"),
        ("/nowhere/at/all", {"backend": "torch"}, "model_not_found", "/nowhere/at/all"),
    ],
)
async def test_a_failed_load_has_its_own_code_and_leaves_nothing(
    model: str, more: dict[str, object], code: str, words: str, tmp_path: Path
) -> None:
    embedded = EmbeddedModel(config(model, **more), tmp_path)
    with pytest.raises(APIError, match=words) as caught:
        await embedded.start()
    assert caught.value.code == code
    assert not [a for a in await deploy.in_thread(deploy.applications) if a.startswith(f"sakuradite-{os.getpid()}")]


async def test_cancelled_while_loading_leaves_nothing(tmp_path: Path) -> None:
    model = EmbeddedModel(config("fake?load=60"), tmp_path)
    starting = asyncio.ensure_future(model.start())
    assert await asyncio.to_thread(eventually, lambda: "ray" in model.seconds and deploy.applications() != {})
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await deploy.in_thread(deploy.applications) == {}


@pytest.mark.parametrize("name", ["never-scheduled", "never-loaded"])
async def test_what_never_came_up_is_deleted_without_its_drain_time(
    name: str, model: EmbeddedModel, tmp_path: Path
) -> None:
    """Serve asks a replica that still waits for its resources to drain, and waits for its answer all that time."""
    options = {"num_cpus": 10_000 if name == "never-scheduled" else 0}
    application = model_application(config("fake?load=600"), tmp_path, options=options, drain=600.0)
    await deploy.in_thread(lambda: local.run_in_ray_thread(lambda: deploy.submit(name, lambda: application)))
    actors = f"SERVE_REPLICA::{name}#"
    assert await asyncio.to_thread(eventually, lambda: any(a.startswith(actors) for a in named_actors()))
    deleting = asyncio.ensure_future(deploy.in_thread(lambda: deploy.delete(name, drain=False)))
    assert (await asyncio.wait([deleting], timeout=90))[0]
    assert not [a for a in named_actors() if a.startswith(actors)]


def named_actors() -> list[str]:
    import ray

    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


async def test_nothing_listens_beyond_loopback_but_the_replicas_grpc(model: EmbeddedModel) -> None:
    own = descendants(os.getpid()) | {os.getpid()}
    assert any(loopback for _, loopback, _ in listeners(own))
    strangers = [name(pid) for pid, loopback, _ in listeners(own) if not loopback]
    assert all(title.startswith("ray::ServeReplica:sakuradite-") for title in strangers)
    assert len(strangers) == len({*strangers})


async def test_the_replicas_grpc_refuses_a_call_without_the_token(model: EmbeddedModel) -> None:
    import grpc  # type: ignore[import-untyped]
    from ray.serve.generated import serve_pb2, serve_pb2_grpc

    own = descendants(os.getpid())
    (port,) = {port for pid, loopback, port in listeners(own) if not loopback and model._name in name(pid)}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = serve_pb2_grpc.ASGIServiceStub(channel)
        message = serve_pb2.ASGIRequest(pickled_request_metadata=b"", request_args=b"")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.HandleRequest(message, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_start_left_the_environment_alone() -> None:
    assert not [key for key in os.environ if key.startswith(("RAY_AUTH", "RAY_SERVE", "RAY_USAGE", "RAY_ENABLE"))]


def test_the_temporary_folder_is_private_and_short() -> None:
    folder = local.temp_directory()
    assert folder is not None
    assert len(str(folder / "ray")) <= local.MAX_TEMP_PATH
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "token").stat().st_mode & 0o077 == 0
