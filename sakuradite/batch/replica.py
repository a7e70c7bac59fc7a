"""One replica of a bulk job: an actor with an engine of its own, which decides on parts, several at a time.

Errors of a row are the row's result. A failure that says nothing of a row is the block's, and ends the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from sakuradite.answers import DecisionResult, result
from sakuradite.client.embedded import row_error
from sakuradite.client.request import Decision, check_questions, check_state
from sakuradite.config import ModelConfig
from sakuradite.errors import (
    OF_THE_ROW,
    APIError,
    InternalError,
    MissingExtraError,
    ReplicaUnavailableError,
    SakuraditeError,
    place_of,
)
from sakuradite.http.problems import invalid
from sakuradite.http.reading import read_json
from sakuradite.records import RowAnswer, RowFailure

if TYPE_CHECKING:
    import pyarrow

    from sakuradite.engine.engine import Engine

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What is asked of every row: the questions about its `column`, or about the whole row where that is None."""

    questions: Mapping[str, Any]
    column: str | None


class Replica:
    """Called with blocks of `parts`, from several threads at once; gives a block of results for each."""

    def __init__(self, config: ModelConfig, home: str, asked: Asked, threads: float | None) -> None:
        from sakuradite.cluster.model import set_threads

        self._config, self._column = config, asked.column
        self._questions, self._records = check_questions(asked.questions)
        self._failure: SakuraditeError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        set_threads(threads)
        try:
            self._engine = asyncio.run_coroutine_threadsafe(self._start(Path(home)), self._loop).result()
        except (APIError, MissingExtraError) as error:
            self._failure = error
        except Exception as error:
            self._failure = InternalError(f"loading failed: {type(error).__name__}: {error}")

    async def _start(self, home: Path) -> Engine:
        from sakuradite.engine.engine import Engine

        checkpoint = None
        if self._config.backend != "fake":
            from sakuradite.hub.resolve import resolve

            config = self._config
            found = await asyncio.to_thread(
                resolve, config.model, revision=config.revision, offline=config.offline, home=home
            )
            checkpoint = found.path
        self._room = asyncio.Semaphore(self._config.max_pending_requests)
        engine = Engine(self._config, checkpoint)
        await engine.start()
        return engine

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        columns = block.to_pydict()
        (number,), (first,), (failure,) = columns["part"], columns["first"], columns["failure"]
        if failure is None and self._failure is not None:
            failure = pickle.dumps(self._failure)
        results: list[bytes] = []
        errors = tokens = 0
        if failure is None:
            rows = list(zip(*(columns[name][0] for name in ("data", "problems")), strict=True))
            work = asyncio.run_coroutine_threadsafe(self._part(rows), self._loop)
            try:
                found = work.result()
            except SakuraditeError as error:
                failure = pickle.dumps(error)
            else:
                results = [fields for fields, _ in found]
                errors = sum(read is None for _, read in found)
                tokens = sum(read or 0 for _, read in found)
        return result_block(number, first, results, errors, tokens, failure)

    async def _part(self, rows: Sequence[tuple[bytes, str]]) -> list[tuple[bytes, int | None]]:
        """The fields of each row as JSON, and the tokens read for it; None where it is an error."""
        tasks = [asyncio.ensure_future(self._row(data, problem)) for data, problem in rows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _row(self, data: bytes, problem: str) -> tuple[bytes, int | None]:
        async with self._room:
            try:
                if problem:
                    raise invalid(("body",), problem)
                found = await self._decide(self._state(data))
            except ReplicaUnavailableError:
                os._exit(70)  # the model can answer nothing any more; Ray starts another process and repeats the part
            except APIError as error:
                if error.code not in OF_THE_ROW:
                    raise
                return error_fields(error), None
            except Exception as error:
                log.error("a row failed: %s", place_of(error))
                return error_fields(InternalError("the engine failed on this row")), None
        return to_json(found), found.usage.input_tokens

    def _state(self, data: bytes) -> Any:
        value = read_json(data)
        if self._column is None:
            return value
        if not isinstance(value, dict) or self._column not in value:
            raise invalid(("body", self._column), "the row has no such column", "missing")
        return value[self._column]

    async def _decide(self, state: Any) -> DecisionResult:
        """What `client.decide` gives for the state, or what it raises."""
        decision = Decision(self._config.model, check_state(state), self._questions, self._records, (), None)
        rows: dict[int, RowAnswer] = {}
        async with aclosing(self._engine.decide(decision.record())) as groups:
            async for group in groups:
                for outcome in group:
                    if isinstance(outcome, RowFailure):
                        raise row_error(decision, outcome)
                    rows[outcome.row] = outcome
        return result(decision.model, decision.questions, rows)


def error_fields(error: APIError) -> bytes:
    """What stands in the place of a row's answers."""
    return to_json({"error": {"code": error.code, "message": error.message}})


def result_block(
    part: int, first: int, results: list[bytes], errors: int, tokens: int, failure: bytes | None
) -> pyarrow.Table:
    """A block of one row: the results of a part, in its order, or the pickled failure that ends the job."""
    import pyarrow as pa

    return pa.table(
        {
            "part": [part],
            "first": [first],
            "results": pa.array([results], pa.list_(pa.large_binary())),
            "errors": [errors],
            "tokens": [tokens],
            "failure": pa.array([failure], pa.large_binary()),
        }
    )
