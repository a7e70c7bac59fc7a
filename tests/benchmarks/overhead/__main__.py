"""What a decision costs on its way to a model that computes nothing: the same 1.1 KB request by every path, in one run.

    python -m tests.benchmarks.overhead [--seconds 4]

Paths: the engine called in this process; embedded (a Serve replica by gRPC); HTTP through the router, with the key
checked, the body validated and admission; the same as a stream of events; and uvicorn alone with a trivial answer, for
what the machine gives. Prints a table: median at one caller, requests per second at 16 and at 64.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx

from sakuradite.cluster.embedded import EmbeddedModel
from sakuradite.config import ModelConfig
from sakuradite.engine.engine import Engine
from sakuradite.http.keys import read_admin_key
from sakuradite.records import Candidate, Outcome, QuestionRecord, RequestRecord
from tests.benchmarks.overhead.load import MODEL, QUESTIONS

CALLERS = (1, 16, 64)
API_KEY = "a-key-for-the-benchmark"
UVICORN = """
import sys, uvicorn
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
"""
SERVE = """
import sys
from pathlib import Path
from sakuradite.cluster.daemon import serve
from sakuradite.config import ServerConfig
serve(ServerConfig(port=int(sys.argv[1]), home=Path(sys.argv[2]), api_key=sys.argv[3]))
"""

type Result = dict[int, dict[str, float]]


def record() -> RequestRecord:
    """The record of the HTTP path's body."""
    question = QuestionRecord("choice", ("y" * 100,), (Candidate("a", ("one",)), Candidate("b", ("two",))))
    return RequestRecord("benchmark", ("x" * 300,), (question,) * QUESTIONS)


async def measure(decide: Callable[[RequestRecord], AsyncGenerator[list[Outcome]]], seconds: float) -> Result:
    """The same figures as `load`, of a path that is called from this process."""
    found: Result = {}
    for callers in CALLERS:
        begin = time.perf_counter() + seconds / 5
        end = begin + seconds
        times: list[float] = []

        async def one(begin: float = begin, end: float = end, times: list[float] = times) -> None:
            asked = record()
            while (start := time.perf_counter()) < end:
                rows = 0
                async for group in decide(asked):
                    rows += len(group)
                assert rows == QUESTIONS
                if start >= begin:
                    times.append(time.perf_counter() - start)

        await asyncio.gather(*(one() for _ in range(callers)))
        found[callers] = {"per_second": len(times) / seconds, "p50_ms": statistics.median(times) * 1e3}
    return found


def over_http(port: int, seconds: float, kind: str) -> Result:
    """The figures of an HTTP path, its callers in a process of their own."""
    found: Result = {}
    for callers in CALLERS:
        command = [sys.executable, "-m", "tests.benchmarks.overhead.load"]
        arguments = [str(port), str(callers), str(seconds), API_KEY, kind]
        found[callers] = json.loads(subprocess.run([*command, *arguments], capture_output=True, check=True).stdout)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            httpx.get(url, trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit(f"nothing answers at {url}")


def alone(seconds: float) -> Result:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", UVICORN, str(port)])
    try:
        wait_for(f"http://127.0.0.1:{port}/")
        return over_http(port, seconds, "plain")
    finally:
        process.terminate()
        process.wait()


def served(seconds: float) -> tuple[Result, Result]:
    """Unary and streamed, by the whole stack."""
    with tempfile.TemporaryDirectory() as home:
        port = free_port()
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(port), home, API_KEY], stdout=subprocess.DEVNULL)
        try:
            wait_for(f"http://127.0.0.1:{port}/healthz")
            key = read_admin_key(Path(home))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/admin/v1", trust_env=False, timeout=30) as client:
                client.headers["authorization"] = f"Bearer {key}"
                operation = client.post("/models/load", json={"model": MODEL, "backend": "fake"}).json()
                while operation["status"] in ("pending", "running"):
                    time.sleep(0.2)
                    operation = client.get(f"/operations/{operation['id']}").json()
                assert operation["status"] == "succeeded", operation
            return over_http(port, seconds, "unary"), over_http(port, seconds, "stream")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


async def in_process(seconds: float) -> tuple[Result, Result]:
    """The engine, then embedded."""
    config = ModelConfig(model=MODEL, backend="fake")
    engine = Engine(config, None)
    await engine.start()
    bare = await measure(engine.decide, seconds)
    await engine.stop(0)
    with tempfile.TemporaryDirectory() as home:
        embedded = EmbeddedModel(config, Path(home))
        await embedded.start()
        try:
            return bare, await measure(embedded.decide, seconds)
        finally:
            await embedded.close()


def table(results: dict[str, Result]) -> str:
    """The table, as Markdown."""
    lines = ["| path | p50 ms, 1 caller | per second, 16 | per second, 64 |", "|---|---|---|---|"]
    for path, found in results.items():
        one, sixteen, many = (found[callers] for callers in CALLERS)
        lines.append(f"| {path} | {one['p50_ms']:.2f} | {sixteen['per_second']:.0f} | {many['per_second']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds = parser.parse_args().seconds
    before = os.getloadavg()
    results: dict[str, Any] = {"uvicorn alone": alone(seconds)}
    results["engine in process"], results["embedded"] = asyncio.run(in_process(seconds))
    results["HTTP"], results["HTTP, stream"] = served(seconds)
    print(f"{os.cpu_count()} cores, load average {before[0]:.1f} before and {os.getloadavg()[0]:.1f} after\n")
    print(table(results))


if __name__ == "__main__":
    main()
