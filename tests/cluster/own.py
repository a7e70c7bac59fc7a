"""An application that is not ours, for a Serve config that has others in it."""

from typing import Any

from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Own:
    """Answers one word."""

    def __call__(self) -> str:
        return "mine"


_deployment: Any = Own
app = _deployment.bind()
