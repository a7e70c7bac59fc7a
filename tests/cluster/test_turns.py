"""Who is inside together, and who alone."""

from __future__ import annotations

import asyncio

from sakuradite.cluster.turns import Turns


class Story:
    """Tasks that enter by the kind they are, and what happened in order."""

    def __init__(self) -> None:
        self.turns, self.told = Turns(), list[str]()
        self.leave = {name: asyncio.Event() for name in ("a", "b", "X", "Y", "c")}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, name: str) -> None:
        self.tasks[name] = asyncio.ensure_future(self._inside(name))
        await self._settled()

    async def goes(self, name: str) -> None:
        self.leave[name].set()
        await self._settled()

    async def _inside(self, name: str) -> None:
        async with self.turns.alone() if name.isupper() else self.turns.together():
            self.told.append(f"+{name}")
            await self.leave[name].wait()
        self.told.append(f"-{name}")

    async def _settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_one_that_wants_to_be_alone_waits_for_those_inside_and_holds_up_those_who_come_later() -> None:
    story = Story()
    for name in ("a", "b", "X", "c", "Y"):
        await story.comes(name)
    assert story.told == ["+a", "+b"]
    await story.goes("a")
    assert story.told == ["+a", "+b", "-a"]
    await story.goes("b")
    assert story.told[3:] == ["-b", "+X"]
    await story.goes("X")
    assert story.told[5:] == ["-X", "+c"]
    await story.goes("c")
    await story.goes("Y")
    assert story.told[7:] == ["-c", "+Y", "-Y"]


async def test_those_who_give_up_hold_up_nobody() -> None:
    story = Story()
    for name in ("a", "X", "b"):
        await story.comes(name)
    story.tasks["X"].cancel()
    await asyncio.wait([story.tasks["X"]])
    await story.comes("c")
    assert story.told == ["+a", "+b", "+c"]
    for name in ("a", "b"):
        story.tasks[name].cancel()
        await asyncio.wait([story.tasks[name]])
    await story.goes("c")
    await story.comes("Y")
    assert story.told == ["+a", "+b", "+c", "-c", "+Y"]
    await story.goes("Y")
