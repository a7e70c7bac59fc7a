"""What Ray knows of a replica's death: whether its process ended, or the whole node was lost."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import orjson

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
WORD_SECONDS = 60.0
"""By then Ray has given up a node that no longer answers."""


class Place(NamedTuple):
    """Where a replica runs: the name of its actor and the id of its node."""

    actor: str
    node: str

    def pack(self) -> bytes:
        """As bytes for another process."""
        return orjson.dumps(list(self))

    @classmethod
    def unpack(cls, data: bytes) -> Place:
        """The place of `pack`."""
        return cls(*orjson.loads(data))


def here() -> Place:
    """The place of the replica that this process is."""
    import ray

    context = ray.get_runtime_context()
    return Place(context.get_actor_name() or "", context.get_node_id())


async def node_lost(place: Place) -> bool:
    """Whether a replica that cannot be reached was lost with its node, or is out of reach but lives.

    Of the end of a process alone its node tells Ray at once. Of the end of a node nobody tells; Ray finds out some
    seconds later, and until then takes the replica to be alive.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + WORD_SECONDS
    while await asyncio.to_thread(_lives, place.actor):
        if clock() > end:
            return True
        await asyncio.sleep(LOOK_SECONDS)
    return not await asyncio.to_thread(_stands, place.node)


def _lives(actor: str) -> bool:
    import ray

    try:
        ray.get_actor(actor, namespace="serve")
    except ValueError:
        return False
    return True


def _stands(node: str) -> bool:
    import ray

    return any(known["NodeID"] == node and known["Alive"] for known in ray.nodes())
