"""The engine from request to outcomes, with the model that has no weights: admission, deadlines, faults, the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sakuradite.config import ModelConfig
from sakuradite.engine import fake
from sakuradite.engine.backend import Backend
from sakuradite.engine.engine import Engine, request_bytes
from sakuradite.engine.fake import FakeBackend
from sakuradite.engine.job import Job
from sakuradite.engine.tokenizer import Tokenizer
from sakuradite.errors import (
    APIError,
    CapacityExceededError,
    ConfigurationError,
    InsufficientResourcesError,
    MissingExtraError,
    ModelLoadFailedError,
    ModelLoadingError,
    ReplicaUnavailableError,
    RequestTimeoutError,
    UnsupportedModelError,
    ValidationError,
)
from sakuradite.questions import Choice, Noul, Score, question_record
from sakuradite.records import Candidate, Outcome, QuestionRecord, RequestRecord, RowAnswer, RowFailure

LATE = question_record(Noul(instructions="The parcel was late."))
TEAM = question_record(Choice(criteria={"billing": "invoices", "shipping": None}))
MOOD = question_record(Score(criteria=["calm", "annoyed", "furious"]))


def asked(state: str, *questions: QuestionRecord, **fields: Any) -> RequestRecord:
    return RequestRecord("r", (state,), questions or (LATE,), **fields)


class GatedBackend(FakeBackend):
    """Its forwards wait while the gate is closed; with `one_by_one` the gate closes behind each."""

    one_by_one = False

    def __init__(self, options: fake.Options) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.states: list[list[bytes]] = []
        self.holding: list[int] = []

    def score(self, groups: Any) -> Any:
        self.entered.set()
        self.holding.append(len(self.held))
        self.states.append([bytes(t for t in group.prefix.tokens if t < 256) for group in groups])
        assert self.gate.wait(30)
        if self.one_by_one:
            self.gate.clear()
        return super().score(groups)

    async def hold(self, engine: Engine) -> asyncio.Task[list[Outcome]]:
        """Close the gate and have one request wait in a forward behind it."""
        self.gate.clear()
        self.entered.clear()
        first = asyncio.create_task(answers(engine, asked("first")))
        await asyncio.to_thread(self.entered.wait, 30)
        return first


class Loaded:
    """A loader that keeps the backend at hand."""

    def __init__(self) -> None:
        self.backend: GatedBackend

    def __call__(self, config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
        tokenizer, _ = fake.load(config)
        self.backend = GatedBackend(fake.options_of(config.model))
        return tokenizer, self.backend


@asynccontextmanager
async def running(options: str = "", **settings: Any) -> AsyncIterator[tuple[Engine, GatedBackend]]:
    """A started engine and its backend, whose probe is forgotten."""
    loaded = Loaded()
    engine = Engine(ModelConfig(model=f"fake?{options}", backend="fake", **settings), None, load=loaded)
    await engine.start()
    loaded.backend.forwards.clear()
    loaded.backend.states.clear()
    loaded.backend.holding.clear()
    loaded.backend.released = 0
    try:
        yield engine, loaded.backend
    finally:
        await engine.stop(drain=0)
        assert loaded.backend.closed
        assert not loaded.backend.held
        assert (engine.pending_requests, engine.pending_bytes) == (0, 0)
        assert (engine.pending_tokens, engine.pending_questions) == (0, 0)


async def answers(engine: Engine, request: RequestRecord) -> list[Outcome]:
    """All outcomes of a request, by question; each question once."""
    found = [outcome async for group in engine.decide(request) for outcome in group]
    found.sort(key=lambda outcome: outcome.row)
    assert [outcome.row for outcome in found] == list(range(len(request.questions)))
    return found


def probabilities(outcomes: list[Outcome]) -> list[tuple[float, ...]]:
    assert all(isinstance(outcome, RowAnswer) for outcome in outcomes)
    return [outcome.probabilities for outcome in outcomes if isinstance(outcome, RowAnswer)]


def codes(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error.code if isinstance(outcome, RowFailure) else "ok" for outcome in outcomes]


async def refusal(engine: Engine, request: RequestRecord) -> APIError:
    with pytest.raises(APIError) as caught:
        await answers(engine, request)
    return caught.value


# Answers


async def test_every_question_gets_one_normalised_answer() -> None:
    async with running() as (engine, _):
        found = await answers(engine, asked("It came two days late.", LATE, TEAM, MOOD))
        for outcome, n in zip(found, (2, 2, 3), strict=True):
            assert isinstance(outcome, RowAnswer)
            assert len(outcome.probabilities) == n
            assert sum(outcome.probabilities) == pytest.approx(1, abs=1e-12)
            assert outcome.label_mass == pytest.approx(0.9, abs=1e-6)
            assert outcome.input_tokens > len("It came two days late.")


@pytest.mark.parametrize("options", [1, 2, 26, 27, 64, 128, 255])
async def test_more_than_26_options_rejected(options: int) -> None:
    """Case 5. (256 are refused where questions are validated.)"""
    async with running() as (engine, _):
        question = question_record(Choice(criteria={f"option {i}": None for i in range(options)}))
        (found,) = probabilities(await answers(engine, asked("x", question)))
        assert len(found) == options
        assert min(found) > 0
        assert sum(found) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("layout", ["packed", "cloned", "padded"])
async def test_company_does_not_move_an_answer(layout: str) -> None:
    """Case 22: alone, with others, reordered, beside other requests: the same numbers."""
    async with running(f"layout={layout}", max_batch_size=7, max_batch_tokens=900) as (engine, _):
        many = question_record(Choice(criteria={str(i): None for i in range(100)}))
        alone = [probabilities(await answers(engine, asked("s", q)))[0] for q in (LATE, TEAM, many)]
        crowd = [asked(f"other {i}", LATE, many, MOOD) for i in range(9)]
        mixed = asked("s", MOOD, many, *[MOOD] * 20, TEAM, LATE)
        found, *_ = await asyncio.gather(answers(engine, mixed), *(answers(engine, request) for request in crowd))
        assert [probabilities(found)[i] for i in (-1, -2, 1)] == alone


async def test_waiting_requests_share_batches() -> None:
    async with running(max_batch_size=16) as (engine, backend):
        first = await backend.hold(engine)
        waiting = [asyncio.create_task(answers(engine, asked(f"state {i}"))) for i in range(33)]
        await asyncio.sleep(0)
        backend.gate.set()
        await asyncio.gather(first, *waiting)
        assert backend.forwards == [1, 16, 16, 1]


async def test_a_lone_request_waits_for_nothing() -> None:
    """No sleep window: with an empty queue a request is one forward at once."""
    async with running() as (engine, backend):
        for _ in range(20):
            await answers(engine, asked("x"))
        assert backend.forwards == [1] * 20


async def test_answers_stream_as_their_batches_finish() -> None:
    async with running("latency=0.01", max_batch_size=4) as (engine, backend):
        groups = [len(group) async for group in engine.decide(asked("x", *[LATE] * 12))]
        assert groups == [4, 4, 4]
        assert backend.forwards == [4, 4, 4]
        assert backend.released == 1  # the state is computed once and its cache freed once


async def test_a_reader_that_is_slow_gets_everything() -> None:
    async with running(max_batch_size=2) as (engine, _):
        rows = []
        async for group in engine.decide(asked("x", *[LATE] * 20)):
            rows += [outcome.row for outcome in group]
            await asyncio.sleep(0.01)
        assert sorted(rows) == list(range(20))


async def test_a_request_without_questions_is_complete_at_once() -> None:
    async with running() as (engine, backend):
        assert await answers(engine, RequestRecord("r", ("x",), ())) == []
        assert backend.forwards == []


# What fails alone


async def test_one_bad_row_fails_the_batch_or_hangs_the_queue() -> None:
    """Case 56: three concurrent requests, the middle one over the context limit."""
    async with running(max_input_tokens=1000) as (engine, _):
        found = await asyncio.gather(*(answers(engine, asked("x" * n)) for n in (10, 2000, 10)))
        assert [codes(outcomes) for outcomes in found] == [["ok"], ["context_exceeded"], ["ok"]]


@pytest.mark.parametrize("fault", ["nan", "poison", "spoil"])
async def test_a_poisoned_row_fails_alone(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running(f"{fault}=BAD&latency=0.01") as (engine, _):
        bad = question_record(Noul(instructions="BAD"))
        requests = [asked("x", LATE, bad, LATE), *(asked(f"y{i}") for i in range(10)), asked("z BAD")]
        found = await asyncio.gather(*(answers(engine, request) for request in requests))
        assert codes(found[0]) == ["ok", "inference_failed", "ok"]
        assert [codes(outcomes) for outcomes in found[1:-1]] == [["ok"]] * 10
        assert codes(found[-1]) == ["inference_failed"]
        assert codes(await answers(engine, asked("after"))) == ["ok"]
        assert engine.alive
    logged = [record.getMessage().replace(f"{fault}=BAD", "") for record in caplog.records]
    assert len(logged) == (2 if fault == "spoil" else 0)
    assert "BAD" not in "".join(logged)


async def test_a_batch_too_large_for_the_device_is_halved() -> None:
    async with running("oom_rows=3", max_batch_size=16) as (engine, backend):
        assert codes(await answers(engine, asked("x", *[LATE] * 40))) == ["ok"] * 40
        assert max(backend.forwards) <= 3
        assert sum(backend.forwards) == 40


async def test_a_row_too_large_for_the_device_fails_alone() -> None:
    class Tight(FakeBackend):
        def score(self, groups: Any) -> Any:
            if sum(len(group.prefix.tokens) for group in groups) > 3000:
                from sakuradite.engine.backend import OutOfDeviceMemory

                raise OutOfDeviceMemory("too long")
            return super().score(groups)

    engine = Engine(
        ModelConfig(model="fake", backend="fake"), None, load=lambda c, p: (fake.FakeTokenizer(), Tight(fake.Options()))
    )
    await engine.start()
    found = await asyncio.gather(*(answers(engine, asked("x" * n)) for n in (10, 5000, 10)))
    assert [codes(outcomes) for outcomes in found] == [["ok"], ["inference_failed"], ["ok"]]
    assert isinstance(found[1][0], RowFailure)
    assert "does not fit the device's memory" in found[1][0].error.message
    await engine.stop(drain=0)


async def test_a_model_that_can_answer_nothing_any_more_says_so() -> None:
    """A broken CUDA context fails every later forward: waiting requests fail, and the engine is not healthy."""

    class Breaking(FakeBackend):
        broken = False

        def score(self, groups: Any) -> Any:
            self.broken = self.broken or any(len(group.prefix.tokens) > 3000 for group in groups)
            if self.broken:
                raise RuntimeError("device-side assert")
            return super().score(groups)

    backend = Breaking(fake.Options())
    engine = Engine(ModelConfig(model="fake", backend="fake"), None, load=lambda c, p: (fake.FakeTokenizer(), backend))
    await engine.start()
    assert codes(await answers(engine, asked("x"))) == ["ok"]
    waiting = await asyncio.gather(*(answers(engine, asked("x" * n)) for n in (10, 5000, 10)), return_exceptions=True)
    assert all(isinstance(found, ReplicaUnavailableError) for found in waiting)
    assert not engine.alive
    assert isinstance(await refusal(engine, asked("x")), ReplicaUnavailableError)
    await engine.stop(drain=1)
    assert backend.closed


async def test_a_batch_that_does_not_end_makes_the_engine_stuck() -> None:
    async with running(max_batch_seconds=0.2) as (engine, backend):
        first = await backend.hold(engine)
        assert engine.alive
        await asyncio.sleep(0.3)
        assert not engine.alive
        backend.gate.set()
        assert codes(await first) == ["ok"]
        assert codes(await answers(engine, asked("next"))) == ["ok"]  # so that the batch before is over
        assert engine._worker.busy < 0.2


async def test_waiting_for_work_is_not_being_stuck() -> None:
    async with running(max_batch_seconds=0.2) as (engine, _):
        assert codes(await answers(engine, asked("x"))) == ["ok"]
        await asyncio.sleep(0.3)
        assert engine.alive


def test_a_batch_may_take_longer_than_a_request_may_wait() -> None:
    assert Engine(ModelConfig(model="fake", backend="fake", timeout=10), None)._longest_batch == 50


async def test_a_compiler_that_stumbles_over_a_request_fails_that_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(fake.FakeTokenizer):
        def plain(self, texts: Any) -> Any:
            if any("ODD" in text for text in texts):
                raise RuntimeError(texts[0])
            return super().plain(texts)

    engine = Engine(
        ModelConfig(model="fake", backend="fake"), None, load=lambda c, p: (Picky(), FakeBackend(fake.Options()))
    )
    await engine.start()
    found = await asyncio.gather(*(answers(engine, asked(s)) for s in ("a", "ODD", "b")), return_exceptions=True)
    assert [type(f).__name__ for f in found] == ["list", "InternalError", "list"]
    assert "compiling a request for fake failed: RuntimeError" in caplog.text
    assert "ODD" not in caplog.text
    await engine.stop(drain=0)


# Admission, deadlines, cancellation


async def test_overload_gives_endless_queueing() -> None:
    """Case 58: beyond the queue 429 with Retry-After, the others answered, the engine as good as before."""
    async with running(max_pending_requests=16) as (engine, backend):
        backend.gate.clear()
        asyncio.get_running_loop().call_later(0.05, backend.gate.set)
        found = await asyncio.gather(*(answers(engine, asked(f"{i}")) for i in range(500)), return_exceptions=True)
        refused = [f for f in found if isinstance(f, CapacityExceededError)]
        assert len(refused) == 484
        assert all(error.retry_after is not None and 1 <= error.retry_after <= 30 for error in refused)
        assert "max_pending_requests" in refused[0].message
        assert sum(isinstance(f, list) for f in found) == 16
        assert codes(await answers(engine, asked("after"))) == ["ok"]


async def test_waiting_bytes_are_bounded() -> None:
    async with running(max_pending_bytes=10_000) as (engine, backend):
        backend.gate.clear()
        asyncio.get_running_loop().call_later(0.05, backend.gate.set)
        found = await asyncio.gather(*(answers(engine, asked("x" * 3000)) for i in range(5)), return_exceptions=True)
        assert [isinstance(f, CapacityExceededError) for f in found] == [False] * 3 + [True] * 2
        alone = asked("x" * 7000, *[LATE] * 200)  # more than the limit by itself: it waits for nothing
        assert request_bytes(alone) > 10_000
        assert codes(await answers(engine, alone)) == ["ok"] * 200


def test_bytes_of_a_request() -> None:
    question = QuestionRecord("choice", ("ü",), (Candidate("ab", ("cd",)), Candidate("e")))
    assert request_bytes(RequestRecord("r", ("x\ud800",), (question,), (b"1234",))) == 4 + 2 + 4 + 1 + 4


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"questions": (LATE,) * 5}, ValidationError, r"5 questions; fake\? takes at most 4 in a request"),
        ({"images": (b"x",)}, UnsupportedModelError, r"images not supported by fake\?"),
        ({"state": ("see ", 0)}, ValidationError, "image 0 is named and the request has 0"),
        ({"timeout": 0.0}, RequestTimeoutError, "deadline"),
    ],
)
async def test_what_can_never_succeed_is_refused_at_the_first_step(
    fields: dict[str, Any], kind: type[APIError], message: str
) -> None:
    async with running(max_questions=4) as (engine, backend):
        values = {"id": "r", "state": ("x",), "questions": (LATE,)} | fields
        with pytest.raises(kind, match=message):
            await anext(engine.decide(RequestRecord(**values)))
        assert backend.forwards == []


async def test_a_request_past_its_deadline_is_dropped_before_its_forward() -> None:
    async with running(max_batch_size=1) as (engine, backend):
        first = await backend.hold(engine)
        error = await refusal(engine, asked("late", timeout=0.05))
        assert isinstance(error, RequestTimeoutError)
        assert "0.05 s" in error.message
        backend.gate.set()
        await first
        assert codes(await answers(engine, asked("next"))) == ["ok"]
        assert backend.forwards == [1, 1]


async def test_the_deadline_of_the_model_covers_a_forward_that_hangs() -> None:
    async with running(timeout=0.05) as (engine, backend):
        backend.gate.clear()
        assert isinstance(await refusal(engine, asked("x", timeout=60)), RequestTimeoutError)
        assert engine.pending_requests == 0
        backend.gate.set()


async def test_the_deadline_covers_compilation() -> None:
    import time

    class Slow(fake.FakeTokenizer):
        def plain(self, texts: Any) -> Any:
            time.sleep(0.3 * any("slow" in text for text in texts))
            return super().plain(texts)

    backend = FakeBackend(fake.Options())
    engine = Engine(ModelConfig(model="fake", backend="fake"), None, load=lambda c, p: (Slow(), backend))
    await engine.start()
    backend.forwards.clear()
    assert isinstance(await refusal(engine, asked("slow", timeout=0.1)), RequestTimeoutError)
    assert codes(await answers(engine, asked("quick"))) == ["ok"]
    assert backend.forwards == [1]
    await engine.stop(drain=0)


async def test_answers_before_the_deadline_are_kept() -> None:
    async with running("latency=0.1", max_batch_size=1) as (engine, _):
        rows: list[int] = []

        async def read() -> None:
            async for group in engine.decide(asked("x", *[LATE] * 20, timeout=0.35)):
                rows.extend(outcome.row for outcome in group)

        with pytest.raises(RequestTimeoutError):
            await read()
        assert 1 <= len(rows) <= 3
        assert rows == list(range(len(rows)))


async def test_closing_the_generator_drops_what_has_not_started() -> None:
    async with running(max_batch_size=2) as (engine, backend):
        backend.one_by_one = True
        stream = engine.decide(asked("x", *[LATE] * 100))
        assert len(await anext(stream)) == 2
        await stream.aclose()
        assert engine.pending_requests == 0
        backend.one_by_one = False
        backend.gate.set()
        assert codes(await answers(engine, asked("y"))) == ["ok"]
        assert backend.forwards in ([2, 2, 1], [2, 1])  # the second had started, or not
        assert not backend.held  # freed before the next forward


async def test_a_cancelled_caller_drops_its_rows() -> None:
    async with running(max_batch_size=1) as (engine, backend):
        first = await backend.hold(engine)
        gone = [asyncio.create_task(answers(engine, asked(f"gone {i}"))) for i in range(10)]
        await asyncio.sleep(0)
        assert engine.pending_requests == 11
        for task in gone:
            task.cancel()
        await asyncio.sleep(0)
        assert engine.pending_requests == 1
        backend.gate.set()
        await asyncio.gather(first, *gone, return_exceptions=True)
        assert codes(await answers(engine, asked("after"))) == ["ok"]
        assert backend.forwards == [1, 1]


async def test_a_short_request_is_not_kept_waiting_by_a_long_one() -> None:
    async with running(max_questions=1000) as (engine, backend):
        first = await backend.hold(engine)
        long = asyncio.create_task(answers(engine, asked("x" * 500, *[LATE] * 800)))
        await asyncio.sleep(0)
        short = asyncio.create_task(answers(engine, asked("short")))
        await asyncio.sleep(0)
        backend.gate.set()
        await asyncio.gather(first, short, long)
        assert codes(short.result()) == ["ok"]
        assert len(backend.forwards) == 52
        assert [any(b"short" in state for state in states) for states in backend.states[:2]] == [False, True]


# Load and end


async def test_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(ModelConfig(model="fake?load=0.1", backend="fake"), None)
    assert engine.capabilities is None
    loading = asyncio.create_task(engine.start())
    await asyncio.sleep(0.02)
    error = await refusal(engine, asked("x"))
    assert isinstance(error, ModelLoadingError)
    assert error.retry_after == 1.0
    capabilities = await loading
    assert engine.capabilities is capabilities
    assert capabilities.prefix_reuse == "packed: nothing is computed"
    assert capabilities.label_mass == pytest.approx(0.9, abs=1e-6)
    assert (capabilities.max_input_tokens, capabilities.max_questions, capabilities.warnings) == (8192, 400, ())
    await engine.stop(drain=0)
    assert isinstance(await refusal(engine, asked("x")), ReplicaUnavailableError)


async def test_warnings_at_load(caplog: pytest.LogCaptureFixture) -> None:
    """Case 13: labels with hardly any probability; and rows that can be longer than a batch."""
    async with running("mass=0.002&context=5000", max_batch_tokens=4000, max_input_tokens=9000) as (engine, _):
        assert engine.capabilities is not None
        low, long = engine.capabilities.warnings
        assert "only 0.2" in low
        assert "5000 tokens (max_input_tokens) and a batch has 4000" in long
        assert engine.capabilities.max_input_tokens == 5000
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("model", "settings", "kind"),
    [
        ("fake?load_error=unsupported_model", {}, UnsupportedModelError),
        ("fake?load_error=insufficient_resources", {}, InsufficientResourcesError),
        ("fake?speed=9", {}, ConfigurationError),
        ("fake?latency=soon", {}, ConfigurationError),
        ("fake", {"device": "cuda"}, InsufficientResourcesError),
        ("fake?nan=parcel", {}, ModelLoadFailedError),
        ("a/model", {"backend": "torch"}, ModelLoadFailedError),
    ],
)
async def test_load_errors_keep_their_class(model: str, settings: dict[str, Any], kind: type[APIError]) -> None:
    engine = Engine(ModelConfig(**{"model": model, "backend": "fake"} | settings), None)
    with pytest.raises(kind):
        await engine.start()
    await engine.stop(drain=0)


class Panic(BaseException):
    """Rust's panics are no Exception."""


@pytest.mark.parametrize("error", [KeyError("model.embed_tokens.weight"), Panic("model.embed_tokens.weight")])
async def test_an_unexpected_load_error_names_its_class(error: BaseException) -> None:
    def load(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
        raise error

    engine = Engine(ModelConfig(model="a/model"), None, load=load)
    with pytest.raises(
        ModelLoadFailedError, match=rf"a/model could not be loaded: {type(error).__name__}: .*model\.embed"
    ):
        await engine.start()


async def test_a_failed_load_keeps_no_weights_alive() -> None:
    class Weights:
        """Something large that was half loaded."""

    def load(config: ModelConfig, checkpoint: Path | None) -> tuple[Tokenizer, Backend]:
        weights = Weights()
        try:
            raise OSError(weights)
        except OSError:
            raise UnsupportedModelError("no such layout") from None

    engine = Engine(ModelConfig(model="a/model"), None, load=load)
    with pytest.raises(UnsupportedModelError):
        await engine.start()
    gc.collect()
    # By type: isinstance would ask every object for its __class__, which some of them answer with a warning.
    assert not [item for item in gc.get_objects() if type(item) is Weights]


async def test_a_model_that_cannot_run_a_forward_fails_its_load_with_the_cause() -> None:
    class Broken(FakeBackend):
        def score(self, groups: Any) -> Any:
            raise RuntimeError("no kernel image is available for execution on the device")

    backend = Broken(fake.Options())
    engine = Engine(ModelConfig(model="m"), None, load=lambda c, p: (fake.FakeTokenizer(), backend))
    with pytest.raises(ModelLoadFailedError, match="m could not be loaded: RuntimeError: no kernel image"):
        await engine.start()
    assert backend.closed


async def test_labels_of_two_tokens_free_their_own_cache_when_they_are_answered() -> None:
    async with running(max_batch_size=8) as (engine, backend):
        many = question_record(Choice(criteria={str(i): None for i in range(255)}))
        assert codes(await answers(engine, asked("x", many, *[LATE] * 20))) == ["ok"] * 21
        assert backend.holding == [0, 1, 1, 1]  # ten rows on the question's own prefix, twenty on the state's


async def test_a_missing_runtime_names_its_extra(zoo: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    for backend, extra in (("torch", "torch"), ("mlx", "mlx"), ("auto", "torch")):
        engine = Engine(ModelConfig.model_validate({"model": "m", "backend": backend}), zoo["qwen"])
        with pytest.raises(MissingExtraError, match=rf"sakuradite\[{extra}\]"):
            await engine.start()


async def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    zoo: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend(fake.Options())
    monkeypatch.setattr("sakuradite.engine.loading._runtime", lambda config, checkpoint: backend)
    engine = Engine(ModelConfig(model="m", backend="torch"), zoo["qwen"])
    with pytest.raises(UnsupportedModelError, match="vocabulary has only 258 entries"):
        await engine.start()
    assert backend.closed


async def test_stop_drains_what_is_there_and_takes_nothing_new() -> None:
    loaded = Loaded()
    engine = Engine(ModelConfig(model="fake", backend="fake", max_batch_size=1), None, load=loaded)
    await engine.start()
    first = await loaded.backend.hold(engine)
    waiting = [first, *(asyncio.create_task(answers(engine, asked(f"{i}"))) for i in range(3))]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(engine.stop(drain=30))
    await asyncio.sleep(0)
    loaded.backend.gate.set()
    assert isinstance(await refusal(engine, asked("x")), ReplicaUnavailableError)
    assert [codes(outcomes) for outcomes in await asyncio.gather(*waiting)] == [["ok"]] * 4
    await stopping
    assert loaded.backend.closed
    assert not loaded.backend.held


async def test_stop_fails_what_is_left_after_the_drain() -> None:
    loaded = Loaded()
    engine = Engine(ModelConfig(model="fake", backend="fake", max_batch_size=1), None, load=loaded)
    await engine.start()
    loaded.backend.forwards.clear()
    waiting = [await loaded.backend.hold(engine)]
    waiting += [asyncio.create_task(answers(engine, asked(f"{i}"))) for i in range(5)]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(engine.stop(drain=0.05))
    found = await asyncio.gather(*waiting, return_exceptions=True)  # they do not wait for the forward
    assert all(isinstance(f, ReplicaUnavailableError) for f in found)
    loaded.backend.gate.set()
    await stopping
    assert loaded.backend.closed
    assert loaded.backend.forwards == [1]  # the one that was running, none of the others


async def test_nothing_of_a_finished_request_is_kept() -> None:
    async with running(max_batch_size=3) as (engine, backend):
        for _ in range(20):
            await answers(engine, RequestRecord("finished", ("x" * 100,), (LATE,) * 7))
        assert backend.released == 20
        assert not backend.held
        await answers(engine, asked("another"))  # so that the last batch is over and has let go
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) is Job and item.request.id == "finished"]


@pytest.mark.parametrize("layout", ["packed", "cloned", "padded"])
async def test_a_crowd_of_everything_at_once_leaves_nothing_behind(layout: str) -> None:
    """Answers, faults, full queues, deadlines and callers that go, all mixed: every request ends, each row comes once
    at most, and nothing is left (`running` checks that)."""
    chance = random.Random(layout)
    many = question_record(Choice(criteria={str(i): None for i in range(60)}))
    bad = question_record(Noul(instructions="BAD"))
    ends: dict[str, int] = {}

    async def caller(engine: Engine) -> None:
        await asyncio.sleep(chance.random() / 20)
        questions = chance.choices((LATE, TEAM, MOOD, many, bad), k=chance.randint(1, 30))
        patience = chance.choice((None, None, 0.02, 0.1))
        request = asked("x" * chance.randint(0, 900), *questions, timeout=patience)
        wanted = chance.choice((len(questions), len(questions), 1))
        rows: list[int] = []
        stream = engine.decide(request)
        end = "read"
        try:
            async for group in stream:
                for outcome in group:
                    rows.append(outcome.row)
                    assert isinstance(outcome, RowFailure) == (questions[outcome.row] is bad)
                if len(rows) >= wanted:
                    break
        except (CapacityExceededError, RequestTimeoutError) as error:
            end = error.code
        await stream.aclose()
        assert len(rows) == len(set(rows))
        ends[end] = ends.get(end, 0) + 1

    settings = {"max_pending_requests": 40, "max_batch_size": 9, "max_batch_tokens": 1500}
    async with running(f"layout={layout}&poison=BAD&oom_rows=5&token_latency=0.000002", **settings) as (engine, _):
        await asyncio.gather(*(caller(engine) for _ in range(120)))
        assert codes(await answers(engine, asked("after"))) == ["ok"]
    assert sum(ends.values()) == 120
    assert ends["read"] > 0
