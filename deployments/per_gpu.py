"""One model with a replica for each GPU that the cluster has now: a config cannot say that, for it does not see them.

    serve run deployments.per_gpu:application model=Qwen/Qwen3-0.6B

Router, catalog and model are one application here. The keys come from Ray's environment, as with a config.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from sakuradite.cluster.application import ModelArguments, ServerArguments, model, server_beside
from sakuradite.config import ModelConfig, ServerConfig


class Arguments(BaseModel):
    """`model`, and whichever backend; a misspelt argument is refused."""

    model_config = ConfigDict(extra="forbid")

    model: str
    backend: str = "torch"


def application(arguments: Arguments) -> Any:
    """The application. Without a GPU: one replica on the CPU."""
    import ray

    ray.init(address="auto", ignore_reinit_error=True)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    config = ModelConfig.model_validate(
        {
            "model": arguments.model,
            "backend": arguments.backend,
            "device": "cuda" if gpus else "cpu",
            "replicas": max(1, gpus),
        }
    )
    server = ServerArguments(config=ServerConfig(default_model=arguments.model))
    return server_beside(server, model(ModelArguments(config=config)))
