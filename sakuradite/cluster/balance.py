"""Which replica of a model gets a request: the one with the fewest tokens to compute for this caller.

Serve counts calls; one call may carry sixty requests, and one request may be as long as a hundred others. What this was
worth is in docs/cluster.md.
"""

from __future__ import annotations

from collections.abc import Collection
from random import choice

from sakuradite.records import Packet

BYTES_PER_TOKEN = 4
QUESTION_TOKENS = 40
"""The fixed wording around a question."""
IMAGE_TOKENS = 500


def tokens_of(packet: Packet, questions: int) -> float:
    """About how many tokens a request is to compute: its text is not tokenised here."""
    body, images = packet
    return len(body) / BYTES_PER_TOKEN + questions * (QUESTION_TOKENS + len(images) * IMAGE_TOKENS)


class TokenQueues:
    """The tokens that a caller has sent to each replica and has no answers for yet."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def choose(self, replicas: Collection[str], tokens: float, avoid: str = "") -> str:
        """The replica with the shortest queue, which gets the tokens; `avoid` only if it is all there is.

        "" where no replica is known: then Serve holds the request until there is one.
        """
        if not replicas:
            return ""
        if self._tokens.keys() != set(replicas):
            self._tokens = {replica: self._tokens.get(replica, 0.0) for replica in replicas}
        if len(self._tokens) == 1:
            (chosen,) = self._tokens
        else:
            allowed = [replica for replica in replicas if replica != avoid] or list(replicas)
            least = min(self._tokens[replica] for replica in allowed)
            chosen = choice([replica for replica in allowed if self._tokens[replica] == least])
        self._tokens[chosen] += tokens
        return chosen

    def answered(self, replica: str, tokens: float) -> None:
        """Take tokens off a queue; a replica that has gone has none."""
        if replica in self._tokens:
            self._tokens[replica] = max(0.0, self._tokens[replica] - tokens)
