"""One model in the caller's own Ray: what a `Sakuradite` client without a `base_url` talks to."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sakuradite.cluster import deploy, local
from sakuradite.cluster.calls import ModelCalls
from sakuradite.config import ModelConfig
from sakuradite.errors import InvalidLifecycleError
from sakuradite.operations import ModelCapabilities
from sakuradite.records import Outcome, RequestRecord

DRAIN_SECONDS = 5.0
"""On a joined Ray: for a forward that is running when the client closes."""

QUIETLY = {"default_level": "warning"}
"""How a model logs inside somebody else's program, which may let its workers' output through to a terminal."""


class EmbeddedModel:
    """A model of one client: `start` it once, `decide` from the same event loop, `close` it.

    Several may be open at once in a process; they share its Ray. `seconds` tells what the start took, by phase.
    """

    def __init__(self, config: ModelConfig, home: Path, *, logs: bool = False) -> None:
        """Nothing is started. `logs` lets the workers' output through to the terminal."""
        self._config, self._home, self._logs = config, home, logs
        self._name = f"sakuradite-{os.getpid()}-{secrets.token_hex(4)}"
        self._hold: local.Hold | None = None
        self._submitted = False
        self._calls: ModelCalls | None = None
        self._closed = False
        self.capabilities: ModelCapabilities | None = None
        self.seconds: dict[str, float] = {}

    async def start(self) -> ModelCapabilities:
        """Start or join Ray, deploy the model, wait until it answered its probe. About 5 s and the model's own time.

        A failure or a cancellation leaves nothing behind. Raises the model's own failure.
        """
        if self._closed or self._hold is not None:
            raise InvalidLifecycleError("a client is opened once; make a new one")
        try:
            return await self._start()
        except BaseException:
            await deploy.to_the_end(self._take_down())
            raise

    async def _start(self) -> ModelCapabilities:
        await deploy.to_the_end(self._acquire())
        assert self._hold is not None
        clock = time.perf_counter()
        owned = self._hold.owned
        self._submitted = True
        await deploy.in_thread(
            lambda: local.run_in_ray_thread(lambda: deploy.submit(self._name, lambda: self._build(owned)))
        )
        self._calls = ModelCalls(self._name, self._config.timeout, self._config.cold_start)
        self.capabilities = await deploy.wait_until_ready(self._name, self._calls)
        self.seconds["model"] = time.perf_counter() - clock
        return self.capabilities

    async def _acquire(self) -> None:
        self._hold = await deploy.in_thread(lambda: local.acquire(self._logs))
        self.seconds.update(self._hold.seconds)

    def _build(self, owned: bool) -> Any:
        from sakuradite.cluster.application import model_application
        from sakuradite.cluster.resources import check_resources

        if owned:
            # This machine is ours alone: nothing to schedule, every device is visible, the model picks its own.
            options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self._config.num_gpus or 0}
            return model_application(
                self._config, self._home, options=options, environment=False, logs=QUIETLY, drain=DRAIN_SECONDS
            )
        import ray

        return model_application(
            self._config,
            self._home,
            options=check_resources(self._config),
            owner=ray.get_runtime_context().get_job_id(),
            logs=QUIETLY,
            drain=DRAIN_SECONDS,
        )

    def decide(self, request: RequestRecord) -> AsyncGenerator[list[Outcome]]:
        """Outcomes in groups as batches finish, each row exactly once; closing it early cancels the rest."""
        if self._calls is None or self._closed:
            raise InvalidLifecycleError("the client is closed" if self._closed else "the client is not open")
        return self._calls.decide(request)

    async def close(self) -> None:
        """Release the model, and with the process's last one the Ray that was started for it. May be called again."""
        if self._closed:
            return
        self._closed = True
        await deploy.to_the_end(self._take_down())

    async def _take_down(self) -> None:
        self._closed = True
        if self._calls is not None:
            await self._calls.close()
        hold, self._hold = self._hold, None
        if hold is None:
            return
        if self._submitted and not local.is_last():  # the end of an owned Ray ends its applications
            with suppress(Exception):  # a Ray that has died meanwhile has no application either
                await asyncio.wait_for(deploy.in_thread(lambda: deploy.delete(self._name)), DRAIN_SECONDS + 5)
        await deploy.in_thread(local.release)
