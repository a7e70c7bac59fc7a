"""The embedded transport: the model runs on this machine, in a local Ray that the client starts or joins."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sakuradite.answers import DecisionResult, Usage, answer, result
from sakuradite.client.request import Decision
from sakuradite.client.transport import AnswerEvent, CompleteEvent, StreamEvent
from sakuradite.config import BackendName, ModelConfig
from sakuradite.errors import APIError, InternalError, MissingExtraError, error_from_record
from sakuradite.http.dialects import placed
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Outcome, RowAnswer, RowFailure

if TYPE_CHECKING:
    from sakuradite.cluster.embedded import EmbeddedModel

MODULES = {"torch": ("ray", "torch", "transformers"), "mlx": ("ray", "mlx", "mlx_lm"), "fake": ("ray",)}


class EmbeddedTransport:
    """One model in a Ray Serve deployment of its own, gone when the client closes."""

    def __init__(self, config: ModelConfig, home: Path) -> None:
        self.config, self.home = config, home
        self.capabilities: ModelCapabilities | None = None
        self._model: EmbeddedModel | None = None

    async def open(self) -> None:
        require_backend(self.config.backend)
        from sakuradite.cluster.embedded import EmbeddedModel

        model = EmbeddedModel(self.config, self.home)
        try:
            self.capabilities = await model.start()
        except BaseException:
            await model.close()
            raise
        self._model = model

    async def decide(self, decision: Decision) -> DecisionResult:
        rows: dict[int, RowAnswer] = {}
        async with aclosing(self._outcomes(decision)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, RowFailure):
                    raise row_error(decision, outcome)
                rows[outcome.row] = outcome
        _check_complete(decision, rows)
        return result(decision.model, decision.questions, rows)

    async def stream(self, decision: Decision) -> AsyncGenerator[StreamEvent]:
        rows: dict[int, RowAnswer] = {}
        questions = list(decision.questions.items())
        async with aclosing(self._outcomes(decision)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, RowFailure):
                    raise row_error(decision, outcome)
                rows[outcome.row] = outcome
                key, question = questions[outcome.row]
                yield AnswerEvent(
                    model=decision.model,
                    key=key,
                    answer=answer(question, outcome),
                    usage=Usage(input_tokens=outcome.input_tokens),
                )
        _check_complete(decision, rows)
        whole = result(decision.model, decision.questions, rows)
        yield CompleteEvent(model=whole.model, answers=whole.answers, usage=whole.usage)

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()

    async def _outcomes(self, decision: Decision) -> AsyncGenerator[Outcome]:
        assert self._model is not None
        async with aclosing(self._model.decide(decision.record())) as groups:
            async for group in groups:
                for outcome in group:
                    yield outcome


def require_backend(backend: BackendName) -> None:
    """Raise MissingExtraError when what the backend needs is not installed; `auto` needs torch or MLX."""
    present = {name for name, modules in MODULES.items() if all(find_spec(module) for module in modules)}
    if backend == "auto" and not present & {"torch", "mlx"}:
        raise MissingExtraError("Embedded use", "torch")
    if backend != "auto" and backend not in present:
        extra = "server" if backend == "fake" else backend
        raise MissingExtraError(f"Embedded use of the {backend} backend", extra)


def row_error(decision: Decision, failure: RowFailure) -> APIError:
    """The exception of a failed row, naming the question by the caller's id."""
    error = error_from_record(failure.error)
    return error if failure.row < 0 else placed(error, ("body", "questions", list(decision.questions)[failure.row]))


def _check_complete(decision: Decision, rows: dict[int, RowAnswer]) -> None:
    if len(rows) != len(decision.questions):
        raise InternalError(f"the engine answered {len(rows)} of {len(decision.questions)} questions")
