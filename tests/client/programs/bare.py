"""The bare object: values without a loop, awaitables in one, typed as Any."""

from sakuradite import DecisionResult, Noul, Sakuradite

QUESTIONS = {"refund": Noul(instructions="Asks for a refund.")}


def without_a_loop() -> DecisionResult:
    """Methods give values."""
    client = Sakuradite("m")
    result: DecisionResult = client.decide("x", QUESTIONS)
    client.close()
    return result


async def in_a_loop() -> DecisionResult:
    """Methods give awaitables."""
    client = Sakuradite("m")
    result: DecisionResult = await client.decide("x", QUESTIONS)
    await client.close()
    return result
