"""What the catalog makes of the applications that somebody else has put on Serve."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sakuradite.cluster import catalog, declared, gateway
from sakuradite.cluster.application import ServerArguments, server
from sakuradite.cluster.catalog import Catalog
from sakuradite.cluster.declared import DeclaredModels, Seen
from sakuradite.cluster.journal import Journal
from sakuradite.cluster.lifecycle import Lifecycle
from sakuradite.cluster.local import SERVE_ENVIRONMENT
from sakuradite.cluster.metrics import Meters
from sakuradite.cluster.model import Model
from sakuradite.cluster.table import Entry, Table
from sakuradite.cluster.turns import Turns
from sakuradite.config import ModelConfig, ServerConfig
from sakuradite.errors import ErrorRecord
from sakuradite.http.gateway import ResidentModel
from sakuradite.operations import ModelCapabilities
from sakuradite.records import QuestionRecord, RequestRecord, RowFailure, pack_request, unpack_outcomes

CAPABILITIES = ModelCapabilities(
    architecture="Fake",
    backend="fake",
    device="cpu",
    dtype="float32",
    context_length=8192,
    max_input_tokens=8192,
    max_questions=400,
)


def config(model: str = "m", **more: Any) -> ModelConfig:
    return ModelConfig(model=model, backend="fake", **more)


class Replicas:
    """Stands for the replicas of applications: what each would tell of itself."""

    told: dict[str, dict[str, Any]]

    def __init__(self, application: str, timeout: float) -> None:
        self._application = application

    async def describe(self) -> dict[str, Any]:
        return {"owner": None, "failure": None, "capabilities": CAPABILITIES, "created": 5,
                **self.told[self._application]}  # fmt: skip

    async def close(self) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    Replicas.told = {}
    monkeypatch.setattr(declared, "ModelCalls", Replicas)
    return Replicas.told


class Watched(DeclaredModels):
    def __init__(self, own: set[str] | None = None) -> None:
        self.changes = self.asked = 0
        super().__init__(lambda: own or set(), self._count)

    async def _ask(self, name: str, deployed: float) -> None:
        self.asked += 1
        await super()._ask(name, deployed)

    def _count(self) -> None:
        self.changes += 1

    async def see(self, *, deployed: float = 1, message: str = "", **seen: tuple[str, ModelConfig | None]) -> None:
        self.take({name: Seen(status, deployed, message, of) for name, (status, of) in seen.items()})
        await asyncio.gather(*self._asking.values())

    def states(self) -> dict[str, str]:
        return {model: found.state for model, found in self.models.items()}


async def test_a_declared_model_is_loading_until_it_runs(told: dict[str, dict[str, Any]]) -> None:
    models = Watched(own={"loaded"})
    told["loaded"] = {"config": config("l")}
    await models.see(a=("DEPLOYING", config()), loaded=("RUNNING", None), other=("DEPLOYING", None))
    assert (models.states(), models.changes) == ({"m": "loading"}, 1)
    told["a"], told["other"] = {"config": config()}, {"config": config("o")}
    await models.see(a=("RUNNING", config()), other=("RUNNING", None), loaded=("RUNNING", None))
    assert models.states() == {"m": "ready", "o": "ready"}
    assert (models.models["m"].capabilities, models.models["m"].created) == (CAPABILITIES, 5)
    changes = models.changes
    await models.see(a=("RUNNING", config()), other=("RUNNING", None))
    assert models.changes == changes
    await models.see(a=("DELETING", config()))
    assert models.states() == {}


async def test_a_model_that_answered_stays_while_its_application_changes(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    told["a"] = {"config": config()}
    await models.see(a=("RUNNING", config()))
    for status in ("DEPLOYING", "UNHEALTHY", "DEPLOY_FAILED"):
        await models.see(a=(status, config(max_batch_size=3)), deployed=2)
        assert models.states() == {"m": "ready"}
        assert models.models["m"].config.max_batch_size == 16
    told["a"] = {"config": config(max_batch_size=3)}
    await models.see(a=("RUNNING", config(max_batch_size=3)), deployed=2)
    assert models.models["m"].config.max_batch_size == 3


async def test_one_that_is_deployed_again_as_it_was_is_left_asleep(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    told["a"] = {"config": config()}
    await models.see(a=("RUNNING", config()))
    told.clear()  # to ask would fail, and a real one would be started for it
    await models.see(a=("RUNNING", config()), deployed=2)
    assert models.asked == 1
    assert models.states() == {"m": "ready"}


async def test_another_model_in_the_same_application_takes_the_place_at_once(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    told["a"] = {"config": config()}
    await models.see(a=("RUNNING", config()))
    await models.see(a=("DEPLOYING", config("n")), deployed=2)
    assert models.states() == {"n": "loading"}
    told["a"] = {"config": config("n")}
    await models.see(a=("RUNNING", config("n")), deployed=2)
    assert models.states() == {"n": "ready"}


async def test_a_model_that_cannot_load_says_why_and_may_recover(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    failure = ErrorRecord("model_not_found", 404, "no such folder")
    told["a"] = {"config": config(), "failure": failure, "capabilities": None}
    await models.see(a=("RUNNING", config()))
    assert models.states() == {"m": "failed"}
    await models.see(a=("UNHEALTHY", config()), message="a replica failed")
    error = models.models["m"].error
    assert error is not None
    assert (error.code, error.message, error.status_code) == ("model_not_found", "no such folder", 404)
    told["a"] = {"config": config()}
    await models.see(a=("RUNNING", config()))
    assert (models.states(), models.models["m"].error) == ({"m": "ready"}, None)


async def test_an_application_that_cannot_be_deployed_is_shown_with_serves_words(
    told: dict[str, dict[str, Any]],
) -> None:
    models = Watched()
    await models.see(a=("DEPLOY_FAILED", config()), message="no resources")
    error = models.models["m"].error
    assert error is not None
    assert (models.states(), error.message) == ({"m": "failed"}, "no resources")


async def test_an_embedded_client_is_nobody_elses_business(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    told["a"] = {"config": config(), "owner": "01000000"}
    await models.see(a=("RUNNING", None))
    assert models.states() == {}


async def test_a_replica_that_is_late_is_asked_again(told: dict[str, dict[str, Any]]) -> None:
    models = Watched()
    await models.see(a=("RUNNING", config()))  # Replicas.told has nothing: a KeyError stands for whatever went wrong
    assert models.states() == {}
    told["a"] = {"config": config()}
    await models.see(a=("RUNNING", config()))
    assert models.states() == {"m": "ready"}


class Books(Catalog):
    """A catalog outside Serve: what it keeps, and nothing that looks at a cluster."""

    def __init__(self, home: Path) -> None:
        self._settings, self._home, self._version, self._routers = ServerConfig(), home, 0, {}
        self._change, self._heard = asyncio.Event(), asyncio.Event()
        self._lifecycle = Lifecycle(Journal(home), home, "session", 1.0, self._changed, self._published)
        self._declared = DeclaredModels(self._own_applications, self._changed)

    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits that of a catalog; nobody does here."""


@pytest.fixture
async def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, dict[str, Any]]) -> Books:
    """A catalog that has loaded m, which is declared as well, and n, which is declared only."""
    monkeypatch.setattr(catalog, "replica_counts", dict)
    made = Books(tmp_path)

    async def load(*_: Any) -> None:
        record = made._lifecycle.models["m"]
        record.state, record.capabilities = "ready", CAPABILITIES

    monkeypatch.setattr(made._lifecycle, "_load", load)
    assert (await made.ask("load", config())).error is None
    await asyncio.sleep(0)
    told |= {"a": {"config": config()}, "b": {"config": config("n")}}
    made._declared.take({name: Seen("RUNNING", 1, "", told[name]["config"]) for name in told})
    await asyncio.gather(*made._declared._asking.values())
    return made


async def test_of_a_model_that_is_loaded_and_declared_the_loaded_one_serves_until_it_is_unloaded(books: Books) -> None:
    assert {m: e.application[:7] for m, e in books._table().entries.items()} == {"m": "model-m", "n": "b"}
    assert [s.model for s in (await books.ask("models")).value] == ["m", "n"]
    books._lifecycle.models["m"].state = "failed"  # what is left of a load that failed hides nothing
    assert books._table().entries["m"].application == "a"
    assert [(s.model, s.status) for s in (await books.ask("models")).value] == [("m", "ready"), ("n", "ready")]
    books._lifecycle.models["m"].state = "loading"
    await books.ask("unload", "m")
    assert books._table().entries["m"].application == "a"


@pytest.mark.parametrize("question", ["unload", "remove"])
async def test_a_declared_model_is_changed_where_it_is_declared(books: Books, question: str) -> None:
    error = (await books.ask(question, "n")).error
    assert error is not None
    assert (error.status, error.code) == (409, "invalid_lifecycle")
    assert "n is declared by the Serve application 'b'" in error.message
    assert (await books.ask("load", config("n"))).error == error


async def test_an_alias_may_name_a_declared_model_and_not_hide_one(books: Books) -> None:
    assert (await books.ask("set_alias", "short", "n")).value.model == "n"
    assert books._table().resolve("short").id == "n"
    shown = {s.model: s.aliases for s in (await books.ask("models")).value}
    assert shown == {"m": (), "n": ("short",)}
    refused = (await books.ask("set_alias", "n", "m")).error
    assert refused is not None
    assert refused.param == "alias"


async def test_metrics_count_declared_models_by_their_own_state(books: Books) -> None:
    meters = Meters("catalog")
    books._seeing = cast(Any, SimpleNamespace(meters=meters))
    books._lifecycle.models["m"].state = "failed"  # and declared, which serves
    there = {"a": config(), "b": config("n")}
    seen = {name: Seen("RUNNING", 1, "", found) for name, found in there.items()}
    books._declared.take({**seen, "c": Seen("DEPLOYING", 1, "", config("o"))})
    books._look()
    states = {s.labels["state"]: s.value for f in meters.families() if "models" in f.name for s in f.samples}
    assert states == {"ready": 2, "loading": 1, "draining": 0, "failed": 0}
    del books._seeing


async def test_a_replica_refuses_requests_for_the_model_that_its_application_had_before() -> None:
    """The redeploy of another model under the same application name must not answer what waits for the old one."""

    class Replica(Model):
        def __init__(self) -> None:
            self._config, self._turns = config("new"), Turns()

        def __del__(self) -> None:  # type: ignore[override]
            """Serve awaits that of a model; nobody does here."""

    replica = Replica()
    request = pack_request(RequestRecord("r", ("x",), (QuestionRecord("noul", ("y",), ()),)))
    (data,) = [data async for data in replica.decide_many([("key", request)], "old")]
    ((key, (outcome,)),) = unpack_outcomes(data)
    assert isinstance(outcome, RowFailure)
    assert (key, outcome.row, outcome.error.status) == ("key", -1, 503)
    assert outcome.error.retry_after


async def test_a_router_calls_anew_when_a_config_has_changed_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Calls:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        async def retire(self) -> None:
            made.append("retired")

    monkeypatch.setattr(gateway, "ModelCalls", Calls)
    retries = SimpleNamespace(labels=lambda model: f"retries of {model}")
    router = gateway.ServeGateway(None, retries)
    for timeout in (1.0, 1.0, 2.0):
        entry = Entry("ready", "a", timeout, "wait", ResidentModel("m", 0, CAPABILITIES))
        router._take(Table(entries={"m": entry}))
    await asyncio.gather(*router._retiring)
    assert made == [("a", 1.0, "wait", "retries of m", "m"), ("a", 2.0, "wait", "retries of m", "m"), "retired"]


def test_the_catalog_is_where_its_books_are_and_routers_may_be_kept_off_a_head() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Ray's own modules
        router = server(ServerArguments(num_cpus=0.1))._bound_deployment
    assert router.ray_actor_options["num_cpus"] == 0.1
    assert router.ray_actor_options["runtime_env"] == {"env_vars": SERVE_ENVIRONMENT}
    _, books = router.init_args
    options = books._bound_deployment.ray_actor_options
    assert (options["num_cpus"], options["resources"]) == (0, {"node:__internal_head__": 0.001})
