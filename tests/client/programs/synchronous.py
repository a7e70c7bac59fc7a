"""A synchronous program."""

from pathlib import Path
from typing import assert_type

from sakuradite import (
    AnswerEvent,
    Choice,
    DecisionResult,
    DecisionStream,
    ModelConfig,
    Noul,
    Sakuradite,
    SakuraditeError,
    Score,
    SyncClient,
)


def main(flag: bool) -> None:
    """Everything that a synchronous client gives."""
    questions = {"refund": Noul(instructions="Asks for a refund.")}
    with Sakuradite("Qwen/Qwen3-0.6B", backend="torch") as client:
        assert_type(client, SyncClient)
        result = client.decide(state="The parcel is broken.", questions=questions)
        assert_type(result, DecisionResult)
        assert_type(result.nouls["refund"].noul, float)
        assert_type(result.choices["team"].choice, str)
        assert_type(result.scores["urgency"].probabilities, dict[str, float])
        assert_type(result.model_dump_json(), str)

        stream = client.decide("x", questions, stream=True)
        assert_type(stream, DecisionStream)
        for event in stream:
            if isinstance(event, AnswerEvent):
                assert_type(event.key, str)
            else:
                assert_type(event.usage.input_tokens, int)
        assert_type(stream.result, DecisionResult)
        assert_type(client.decide("x", questions, stream=flag), DecisionResult | DecisionStream)

        for row in client.decide_many(["a", {"b": 1}, ["c"]], questions=questions, concurrency=4):
            assert_type(row, DecisionResult | SakuraditeError)
            if isinstance(row, DecisionResult):
                assert_type(row.usage.input_tokens, int)

        mixed = client.decide(
            {"subject": "Broken", "lines": [1, 2]},
            {
                "team": Choice(criteria={"a": "x", "b": None}),
                "urgency": Score(criteria=["low", "high"]),
                "plain": {"type": "noul", "instructions": "x"},
            },
            images=[Path("a.png"), b"...", "data:image/png;base64,..."],
            timeout=5,
        )
        assert_type(mixed, DecisionResult)

    client = Sakuradite(ModelConfig(model="m", max_batch_size=4)).open()
    assert_type(client, SyncClient)
    assert_type(client.models.wait(client.models.load("m")).status == "succeeded", bool)
    client.close()
