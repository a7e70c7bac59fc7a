"""`client.models`: every call against the real routes, and waiting for operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from sakuradite import AsyncClient, ModelConfig, Sakuradite, SyncClient, TransportError
from sakuradite.client import models
from sakuradite.errors import (
    CancelledOperationError,
    ConfigurationError,
    InvalidLifecycleError,
    NotFoundError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    UnsupportedModelError,
)
from sakuradite.operations import Alias, ModelStatus, Operation, Removed
from tests.client.conftest import ADMIN_KEY
from tests.client.raw import RawServer, error, reply
from tests.http.serving import MODEL, Served

type Raw = Callable[..., RawServer]


@pytest.fixture
def client(server: Served) -> Iterator[SyncClient]:
    server.administration.calls.clear()
    with Sakuradite(base_url=server.url, admin_key=ADMIN_KEY) as client:
        yield client


def test_list_gives_statuses(client: SyncClient) -> None:
    (status,) = client.models.list()
    assert isinstance(status, ModelStatus)
    assert (status.model, status.status) == (MODEL, "ready")


def test_ready_gives_names_and_needs_no_admin_key(server: Served) -> None:
    with Sakuradite(base_url=server.url) as client:
        assert list(client.models.ready()) == [MODEL, "jev-latest", "jev-preview", "default"]


def test_inspect_pull_and_load_say_what_was_asked(client: SyncClient, server: Served) -> None:
    assert client.models.inspect("a/b", revision="v1").revision == "v1"
    assert client.models.pull("a/b", offline=True).kind == "pull"
    config = ModelConfig(model="a/b", dtype="float32", max_batch_size=4)
    assert client.models.load(config).model == "a/b"
    assert client.models.load("c/d").kind == "load"
    assert server.administration.calls == [
        ("inspect", "a/b", "v1", False),
        ("pull", "a/b", None, True),
        ("load", config),
        ("load", ModelConfig(model="c/d")),
    ]


def test_unload_and_remove(client: SyncClient) -> None:
    assert client.models.unload(MODEL).status == "unloaded"
    assert client.models.remove("a/b & c") == Removed(model="a/b & c")
    with pytest.raises(InvalidLifecycleError):
        client.models.remove(MODEL)


def test_aliases(client: SyncClient) -> None:
    assert client.models.set_alias("small one", MODEL) == Alias(alias="small one", model=MODEL)
    assert Alias(alias="small one", model=MODEL) in client.models.aliases()
    assert client.models.delete_alias("small one").model == MODEL
    with pytest.raises(NotFoundError):
        client.models.delete_alias("small one")


def test_operations(client: SyncClient) -> None:
    assert [operation.id for operation in client.models.operations()] == ["op_1"]
    assert client.models.operation("op_1").status == "pending"
    with pytest.raises(NotFoundError):
        client.models.operation("op_9")


async def test_every_call_in_coroutines(server: Served) -> None:
    async with Sakuradite(base_url=server.url, admin_key=ADMIN_KEY) as client:
        assert isinstance(client, AsyncClient)
        assert (await client.models.list())[0].model == MODEL
        assert MODEL in await client.models.ready()
        assert (await client.models.inspect("a/b")).model == "a/b"
        assert (await client.models.pull("a/b")).kind == "pull"
        assert (await client.models.load("a/b")).kind == "load"
        assert (await client.models.unload(MODEL)).status == "unloaded"
        assert (await client.models.remove("a/b")).status == "removed"
        assert (await client.models.operations())[0].id == "op_1"
        assert (await client.models.operation("op_1")).id == "op_1"
        assert (await client.models.set_alias("z", MODEL)).alias == "z"
        assert any(alias.alias == "z" for alias in await client.models.aliases())
        assert (await client.models.delete_alias("z")).alias == "z"
        with pytest.raises(RequestTimeoutError):
            await client.models.wait("op_1", timeout=0.2)


def test_the_bare_object_has_models_too(server: Served) -> None:
    client = Sakuradite(base_url=server.url, admin_key=ADMIN_KEY)
    assert client.models.list()[0].model == MODEL
    client.close()


def test_an_embedded_client_has_no_models_to_administer() -> None:
    client = Sakuradite("m", backend="fake")
    with pytest.raises(ConfigurationError, match=r"this client is embedded: pass base_url=.*SAKURADITE_BASE_URL"):
        client.models.list()
    client.close()


# Waiting


def operation(status: str, **fields: Any) -> bytes:
    return reply(200, {"id": "op", "kind": "load", "model": "m", "status": status, **fields})


def wait(server: RawServer, **options: Any) -> Operation:
    with Sakuradite(base_url=server.url, admin_key=ADMIN_KEY) as client:
        return client.models.wait("op", **options)


def test_wait_tells_progress_and_gives_the_end(raw: Raw) -> None:
    half = {"phase": "downloading", "bytes_done": 5, "bytes_total": 10}
    server = raw([operation("pending")], [operation("running", progress=half)], [operation("succeeded")])
    told: list[Operation] = []
    assert wait(server, on_progress=told.append).status == "succeeded"
    assert [o.status for o in told] == ["pending", "running", "succeeded"]
    assert (told[1].progress.phase, told[1].progress.bytes_done, told[1].progress.bytes_total) == ("downloading", 5, 10)


def test_a_failed_operation_raises_its_own_error(raw: Raw) -> None:
    why = {"code": "unsupported_model", "message": "no fast tokenizer", "status_code": 422}
    with pytest.raises(UnsupportedModelError, match="no fast tokenizer") as raised:
        wait(raw([operation("failed", error=why)]))
    assert raised.value.status == 422


def test_a_cancelled_operation_says_so(raw: Raw) -> None:
    with pytest.raises(CancelledOperationError, match="the load of m was cancelled"):
        wait(raw([operation("cancelled")]))


def test_wait_bears_a_router_that_restarts(raw: Raw) -> None:
    away = error(503, "replica_unavailable")
    assert wait(raw([operation("running")], [], [away], [operation("succeeded")])).status == "succeeded"


def test_wait_gives_up_on_a_router_that_stays_away(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ROUTER_AWAY", 0.2)
    with pytest.raises((TransportError, ReplicaUnavailableError)):
        wait(raw([operation("running")], []))


@pytest.mark.parametrize("body", [b"{}", b"[{}]", b"x", orjson.dumps({"models": []})])
def test_an_answer_that_is_no_list_is_a_transport_error(raw: Raw, body: bytes) -> None:
    server = raw([reply(200, body)])
    with Sakuradite(base_url=server.url, admin_key=ADMIN_KEY) as client, pytest.raises(TransportError, match="list of"):
        client.models.list()
