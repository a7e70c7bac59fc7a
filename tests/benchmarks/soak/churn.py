"""Everything that a server meets besides good requests: models that come and go, clients that leave, nonsense, floods.

Each is a coroutine that goes on until it is cancelled and counts what it met in `Met`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

QUESTION = {"type": "choice", "criteria": {"a": None, "b": None}}
FLOOD = 200
"""Requests at once; two replicas take 32 each."""
WAVES = 5


@dataclass
class Met:
    """What the churn met: by kind, how often; and what should not have been."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def expect(self, what: str, good: bool, seen: object) -> None:
        self.counts[what] += 1
        if not good:
            self.wrong.append(f"{what}: {seen}")


@dataclass
class Place:
    """The server and the model under load."""

    url: str
    admin: dict[str, str]
    model: str
    met: Met

    def body(self, questions: int = 1, size: int = 20, **more: Any) -> dict[str, Any]:
        asked = {f"q{i}": QUESTION for i in range(questions)}
        return {"model": self.model, "state": "x" * size, "questions": asked, **more}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=90)


async def second_model(place: Place, pause: float = 2.0) -> None:
    """Load another model, ask it, unload it, again and again."""
    async with place.client() as client:
        for number in range(1_000_000):
            model = f"fake-second-{number % 3}"
            config = {"model": model, "backend": "fake", "num_cpus": 0}
            answer = await client.post("/admin/v1/models/load", json=config, headers=place.admin)
            operation = answer.json()
            while operation["status"] in ("pending", "running"):
                await asyncio.sleep(0.2)
                path = f"/admin/v1/operations/{operation['id']}"
                operation = (await client.get(path, headers=place.admin)).json()
            place.met.expect("second model loaded", operation["status"] == "succeeded", operation)
            answer = await client.post("/v1/decisions", json={**place.body(), "model": model})
            place.met.expect("second model asked", answer.status_code == 200, answer.text)
            await asyncio.sleep(pause)
            answer = await client.post("/admin/v1/models/unload", json={"model": model}, headers=place.admin)
            place.met.expect("second model unloaded", answer.status_code == 200, answer.text)


async def leavers(place: Place) -> None:
    """Streams that are left after the first event, and requests that are given up at once."""
    async with place.client() as client:
        while True:
            body = place.body(40, 2000, stream=True)
            async with client.stream("POST", "/v1/decisions", json=body) as response:
                place.met.expect("stream left", response.status_code in (200, 429), response.status_code)
                if response.status_code == 200:
                    async for _ in response.aiter_lines():
                        break
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/decisions", json=place.body(40), timeout=random.uniform(0.001, 0.02))
            place.met.counts["request given up"] += 1
            await asyncio.sleep(0.2)


async def nonsense(place: Place) -> None:
    """Bad requests of many kinds, each with the status that it must get."""
    good = place.body()
    kinds: list[tuple[bytes, dict[str, str], int]] = [
        (b"{", {}, 422),
        (b"\xff\xfe", {}, 422),
        (b"[" * 200_000, {}, 422),
        (json.dumps({**good, "model": "nobody"}).encode(), {}, 404),
        (json.dumps({**good, "surplus": 1}).encode(), {}, 422),
        (json.dumps(place.body(401)).encode(), {}, 422),
        (json.dumps({**good, "images": ["data:image/png;base64,AAAA"]}).encode(), {}, 422),
        (json.dumps(good).encode(), {"content-encoding": "br"}, 415),
        (b"not gzip", {"content-encoding": "gzip"}, 422),
        (json.dumps(good).encode(), {"content-type": "text/plain"}, 415),
        (b'{"a":' + b"1" * 40_000_000 + b"}", {}, 413),
    ]
    async with place.client() as client:
        while True:
            for content, headers, status in kinds:
                headers = {"content-type": "application/json", **headers}
                answer = await client.post("/v1/decisions", content=content, headers=headers)
                seen = f"{answer.status_code} instead of {status}: {answer.text[:100]}"
                place.met.expect("bad request", answer.status_code in (status, 429), seen)
            await asyncio.sleep(1)


async def slow_readers(place: Place) -> None:
    """Clients that ask for a stream and take a few bytes now and then, and heads that never end."""
    port = int(place.url.rsplit(":", 1)[1])
    body = json.dumps(place.body(100, 500, stream=True)).encode()
    head = f"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    while True:
        opened: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64)
            opened.append(writer)
            _, left = await asyncio.open_connection("127.0.0.1", port)
            opened.append(left)
            left.write(b"POST /v1/decisions HTTP/1.1\r\nHost:")
            writer.write(head.encode() + body)
            for _ in range(20):
                await reader.read(16)
                await asyncio.sleep(0.25)
        finally:
            for one in opened:
                one.close()
        for one in opened:
            with contextlib.suppress(ConnectionError):
                await one.wait_closed()
        place.met.counts["slow reader"] += 1


async def floods(place: Place, pause: float = 20.0) -> None:
    """Far more requests at once than the model holds: the rest is 429, with the time after which to come again.

    Up to WAVES follow each other until one is refused: on a busy machine requests come as slowly as they are answered.
    """
    async with place.client() as client:
        while True:
            await asyncio.sleep(pause)
            for _ in range(WAVES):
                asked = [client.post("/v1/decisions", json=place.body(60, 300)) for _ in range(FLOOD)]
                answers = await asyncio.gather(*asked)
                codes = Counter(answer.status_code for answer in answers)
                place.met.expect("flood", set(codes) <= {200, 429}, dict(codes))
                place.met.counts["429 in floods"] += codes[429]
                told = all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
                place.met.expect("flood told when", told, "a 429 without Retry-After")
                if codes[429]:
                    break
