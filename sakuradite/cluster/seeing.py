"""What every process of ours has for being seen: its log, its metrics on their way to Ray, its traces."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from sakuradite.cluster import logs, tracing
from sakuradite.cluster.exporting import Exporter
from sakuradite.cluster.metrics import Meters, Process
from sakuradite.config import LogSettings
from sakuradite.errors import SakuraditeError

if TYPE_CHECKING:
    from sakuradite.cluster.gathering import Figures

log = logging.getLogger(__name__)


class Seeing:
    """Made in the event loop of a Serve replica, once per process; `close` sends what is left."""

    def __init__(self, process: Process, settings: LogSettings) -> None:
        self.replica = _replica()
        self.lines = logs.start(settings, process, self.replica)
        self.meters = Meters(process)
        self.tracing = _tracing(process)
        self._exporting = asyncio.ensure_future(Exporter(self.meters).run())

    def figures(self) -> Figures:
        """What has been counted, with the name of this replica."""
        return self.replica, self.meters.families()

    async def close(self) -> None:
        """Write the last lines, send the last spans."""
        self._exporting.cancel()
        await asyncio.to_thread(self.lines.flush)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _tracing(process: str) -> tracing.Tracing | None:
    """The traces that the environment asks for. What keeps them from being had is told once; the server serves on."""
    if not tracing.wanted():
        return None
    try:
        return tracing.Tracing(process)
    except SakuraditeError as error:
        log.error("no traces: %s", error)
        return None


def _replica() -> str:
    """Serve's id of this replica: short, and unlike any other."""
    from ray import serve

    context: Any = serve.get_replica_context()
    return str(context.replica_id.unique_id)
