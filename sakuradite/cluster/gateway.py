"""`Gateway` for the HTTP application: the table of models in memory, and calls to their replicas."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from sakuradite.cluster.calls import ModelCalls
from sakuradite.cluster.table import Entry, Table
from sakuradite.errors import ModelNotFoundError
from sakuradite.http.gateway import ResidentModel
from sakuradite.records import Outcome, RequestRecord

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5

type Way = tuple[str, str, float, str]


class ServeGateway:
    """The models of the cluster as one router sees them. `follow` keeps the table fresh."""

    def __init__(self, catalog: Any, retries: Any) -> None:
        """`catalog` is a Serve handle, `retries` a counter by model. Made inside the event loop that will use it."""
        self._retries = retries
        self._catalog = catalog
        self._name = secrets.token_hex(8)
        self._table = Table()
        self._calls: dict[str, tuple[Way, ModelCalls]] = {}
        """By model, with the way that they go."""
        self._retiring: set[asyncio.Task[None]] = set()
        self.followed = asyncio.Event()
        """Set once the first table has come."""

    def resident(self) -> Sequence[ResidentModel]:
        return self._table.ready()

    def resolve(self, name: str) -> ResidentModel:
        return self._table.resolve(name)

    def decide(self, model: ResidentModel, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        if (found := self._calls.get(model.id)) is None:  # unloaded since it was resolved
            raise ModelNotFoundError(f"{model.id} is no longer loaded", param="model")
        return found[1].decide(request)

    def handles(self) -> dict[str, Any]:
        """Serve's handles of the models that are ready, by model."""
        return {model: calls.handle for model, (_, calls) in self._calls.items()}

    def calls_in_flight(self) -> dict[str, int]:
        """Calls on their way, by model."""
        return {model: calls.in_flight for model, (_, calls) in self._calls.items()}

    async def follow(self) -> None:
        """Take over every table that the catalog sends. Ends only by cancellation."""
        while True:
            try:
                table: Table = await self._catalog.watch.remote(
                    self._name, self._table.version if self.followed.is_set() else -1
                )
            except Exception as error:  # whatever ails the catalog, the table in hand goes on serving
                log.warning("the catalog cannot be reached: %s", type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._take(table)
            self.followed.set()

    def _take(self, table: Table) -> None:
        self._table = table
        ready = {model: entry for model, entry in table.entries.items() if entry.state == "ready"}
        for model, (way, calls) in list(self._calls.items()):
            if model not in ready or way_of(ready[model]) != way:
                del self._calls[model]
                task = asyncio.ensure_future(calls.retire())  # the model is drained before it goes
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
        for model, entry in ready.items():
            if model not in self._calls:
                retries = self._retries.labels(model)
                calls = ModelCalls(entry.application, entry.timeout, entry.cold_start, retries, model)
                self._calls[model] = way_of(entry), calls


def way_of(entry: Entry) -> Way:
    """What calls to a model are made for. A Serve config may change any of it, another load brings other replicas."""
    return entry.application, entry.load, entry.timeout, entry.cold_start
