"""A program of coroutines."""

from collections.abc import AsyncIterator
from typing import assert_type

from sakuradite import (
    AnswerEvent,
    AsyncClient,
    AsyncDecisionStream,
    CompleteEvent,
    DecisionResult,
    Noul,
    Sakuradite,
    SakuraditeError,
)
from sakuradite.operations import Inspection, Operation


async def states() -> AsyncIterator[str]:
    """States that come one by one."""
    yield "a"


async def main(flag: bool) -> None:
    """Everything that an asynchronous client gives."""
    questions = {"refund": Noul(instructions="Asks for a refund.")}
    async with Sakuradite(base_url="http://127.0.0.1:7777") as client:
        assert_type(client, AsyncClient)
        assert_type(await client.decide(state="x", questions=questions), DecisionResult)
        async with await client.decide("x", questions, stream=True) as stream:
            assert_type(stream, AsyncDecisionStream)
            async for event in stream:
                assert_type(event, AnswerEvent | CompleteEvent)
            assert_type(stream.result, DecisionResult)
        assert_type(await client.decide("x", questions, stream=flag), DecisionResult | AsyncDecisionStream)
        async for row in client.decide_many(states(), questions):
            assert_type(row, DecisionResult | SakuraditeError)
        assert_type(await client.models.inspect("m"), Inspection)
        assert_type(await client.models.pull("m"), Operation)

    client = await Sakuradite("m").aopen()
    assert_type(client, AsyncClient)
    await client.close()
