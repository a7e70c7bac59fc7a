"""Serve's request router for models: a call goes to the replica that the caller names.

Serve keeps all the rest: which replicas there are, which have died, and calls that wait while there is none.
"""

from __future__ import annotations

from random import sample

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class Directed(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Serve's choice of a replica for a call: the one that the caller names, while it is there and answers."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica at the first try; else all in any order, of which Serve takes the one with fewest calls."""
        found: list[RunningReplica] = []
        if pending_request is not None:
            context, named = pending_request.routing_context, pending_request.kwargs.get("replica")
            if not context.tried_same_node:
                found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == named]
            context.tried_same_node = True
            context.should_backoff = not found
        return [found or sample(candidate_replicas, len(candidate_replicas))]
