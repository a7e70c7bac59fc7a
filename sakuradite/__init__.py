"""Typed decisions with probabilities from open-weight language models.

Names are imported when they are first used, so that `import sakuradite` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sakuradite.answers import ChoiceAnswer, DecisionResult, NoulAnswer, ScoreAnswer, Usage
    from sakuradite.client.describe import Description
    from sakuradite.client.faces import AsyncClient, SyncClient
    from sakuradite.client.sakuradite import Sakuradite
    from sakuradite.client.stream import AsyncDecisionStream, DecisionStream
    from sakuradite.client.transport import AnswerEvent, CompleteEvent
    from sakuradite.config import ModelConfig
    from sakuradite.errors import (
        APIError,
        ClosedError,
        MissingExtraError,
        SakuraditeError,
        TransportError,
        ValidationError,
    )
    from sakuradite.questions import Choice, Noul, NoulCriteria, Score

__version__ = "0.1.0"

__all__ = [
    "APIError",
    "AnswerEvent",
    "AsyncClient",
    "AsyncDecisionStream",
    "Choice",
    "ChoiceAnswer",
    "ClosedError",
    "CompleteEvent",
    "DecisionResult",
    "DecisionStream",
    "Description",
    "MissingExtraError",
    "ModelConfig",
    "Noul",
    "NoulAnswer",
    "NoulCriteria",
    "Sakuradite",
    "SakuraditeError",
    "Score",
    "ScoreAnswer",
    "SyncClient",
    "TransportError",
    "Usage",
    "ValidationError",
    "__version__",
]

_HOMES = {
    "answers": ("ChoiceAnswer", "DecisionResult", "NoulAnswer", "ScoreAnswer", "Usage"),
    "client.describe": ("Description",),
    "client.faces": ("AsyncClient", "SyncClient"),
    "client.sakuradite": ("Sakuradite",),
    "client.stream": ("AsyncDecisionStream", "DecisionStream"),
    "client.transport": ("AnswerEvent", "CompleteEvent"),
    "config": ("ModelConfig",),
    "errors": (
        "APIError", "ClosedError", "MissingExtraError", "SakuraditeError", "TransportError", "ValidationError",
    ),
    "questions": ("Choice", "Noul", "NoulCriteria", "Score"),
}  # fmt: skip
_MODULES = {name: f"sakuradite.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sakuradite' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
