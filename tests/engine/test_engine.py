"""The engine from request to outcomes, with the model that has no weights."""

from __future__ import annotations

from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.questions import Choice, Noul, Score, question_record
from sakuradite.records import Outcome, RequestRecord, RowAnswer

THREE = (
    question_record(Noul(instructions="The parcel was late.")),
    question_record(Choice(criteria={"billing": "invoices", "shipping": None})),
    question_record(Score(criteria=["calm", "annoyed", "furious"])),
)


async def answers(engine: Engine, request: RequestRecord) -> list[Outcome]:
    """All outcomes of a request, by question."""
    found = [outcome async for group in engine.decide(request) for outcome in group]
    return sorted(found, key=lambda outcome: outcome.row)


async def test_every_question_gets_one_normalised_answer() -> None:
    engine = Engine(ModelConfig(model="fake", backend="fake"), None)
    capabilities = await engine.start()
    assert capabilities.architecture == "Fake"
    found = await answers(engine, RequestRecord("r", ("It came two days late.",), THREE))
    assert [o.row for o in found] == [0, 1, 2]
    for outcome, n in zip(found, (2, 2, 3), strict=True):
        assert isinstance(outcome, RowAnswer)
        assert len(outcome.probabilities) == n
        assert abs(sum(outcome.probabilities) - 1) < 1e-12
        assert abs(outcome.label_mass - 0.9) < 1e-6
    await engine.stop(drain=1)
    assert (engine.pending_requests, engine.pending_bytes, engine.pending_tokens) == (0, 0, 0)
