"""Every endpoint, declared once. The server dispatches on this table; `/openapi.json` and `/docs` are made from it."""

from __future__ import annotations

from collections.abc import Sequence

from sakuradite.answers import DecisionResult
from sakuradite.config import ModelConfig
from sakuradite.http import admin, decisions, examples, health, models, refusals
from sakuradite.http.dialects.native import DecisionRequest
from sakuradite.http.dialects.openai import OpenAIDecisionRequest
from sakuradite.http.dialects.systemone import SystemOneRequest
from sakuradite.http.schemas import Event, OpenAIDecision
from sakuradite.http.site import Answer, Parameter, Route
from sakuradite.operations import Alias, Inspection, ModelStatus, Operation, Removed

MODEL_QUERY = Parameter("model", "query", "The id of the stored checkpoint.")
OPERATION_PATH = Parameter("operation_id", "path", "The id that pull or load answered with.")
ALIAS_PATH = Parameter("alias", "path", "The alias; `default` is the default model.")

BODY = ("invalid_request", "request_too_large", "unsupported_media_type", "validation_error")
DECIDING = (
    *BODY,
    "model_not_found",
    "context_exceeded",
    "unsupported_model",
    "capacity_exceeded",
    "inference_failed",
    "model_loading",
    "replica_unavailable",
    "request_timeout",
)
CHECKPOINT = (
    *BODY,
    "model_access_denied",
    "model_not_found",
    "offline_missing",
    "unsupported_model",
    "hub_unavailable",
)

ROUTES: Sequence[Route] = (
    Route(
        "POST",
        "/v1/decisions",
        "createDecision",
        "Decisions",
        "Decide",
        "Answers typed questions about a state, each with probabilities over the candidates supplied. They are "
        "normalised over those candidates; they are not calibrated guarantees of correctness.\n\n"
        "Two dialects share this path, told apart by shape: `state` with a `questions` object is native, `input` with "
        "a "
        '`questions` array is that of the `openai` client. With `"stream": true` the native dialect answers with '
        "server-sent events.",
        "inference",
        decisions.decisions,
        (
            Answer(200, "All answers, in the dialect of the request.", DecisionResult | OpenAIDecision),
            Answer(
                200, "With `stream`: an event for each answer, then `complete` or `error`.", Event, "text/event-stream"
            ),
        ),
        requests=(("application/json", DecisionRequest | OpenAIDecisionRequest),),
        errors=DECIDING,
        examples=examples.DECISIONS,
    ),
    Route(
        "POST",
        "/v1/systemone",
        "createSystemOneDecision",
        "Decisions",
        "Decide, for System One clients",
        "The contract of TypeSafe System One: unknown top-level fields are ignored, aliases such as `jev-latest` name "
        "the default model, errors have their own shape, and nothing streams. Images come as `assets`, inline or as "
        "parts of a form whose first part is named `request`.",
        "inference",
        decisions.system_one,
        (Answer(200, "All answers.", DecisionResult),),
        requests=(("application/json", SystemOneRequest), ("multipart/form-data", SystemOneRequest)),
        errors=DECIDING,
        examples=examples.SYSTEM_ONE,
        refuse=refusals.system_one,
    ),
    Route(
        "GET",
        "/v1/models",
        "listModels",
        "Models",
        "List models that are ready",
        "Resident models and their aliases, in one body for every client. Deciding never loads or downloads a model.",
        "inference",
        models.models,
        (Answer(200, "The models.", models.ModelList),),
        examples=examples.MODELS,
    ),
    Route(
        "GET",
        "/healthz",
        "getHealth",
        "Health",
        "Liveness",
        "200 as long as this router answers. No key is asked for.",
        "open",
        health.healthz,
        (Answer(200, "Alive.", health.Health),),
        examples=examples.HEALTH,
        head=True,
    ),
    Route(
        "GET",
        "/readyz",
        "getReadiness",
        "Health",
        "Readiness",
        "200 when at least one model is ready, else 503. No key is asked for.",
        "open",
        health.readyz,
        (Answer(200, "A model is ready.", health.Health), Answer(503, "No model is ready yet.", health.Health)),
        examples=examples.READY,
        head=True,
    ),
    Route(
        "GET",
        "/admin/v1/models",
        "listStoredModels",
        "Administration",
        "List stored and resident models",
        "Status, configuration, capabilities, replicas, storage, aliases and the last error of every model.",
        "admin",
        admin.models,
        (Answer(200, "The models.", list[ModelStatus]),),
        examples=examples.ADMIN_MODELS,
    ),
    Route(
        "POST",
        "/admin/v1/models/inspect",
        "inspectModel",
        "Administration",
        "Inspect a checkpoint",
        "Facts about a checkpoint from its metadata; no weights are downloaded.",
        "admin",
        admin.inspect,
        (Answer(200, "The facts.", Inspection),),
        requests=(("application/json", admin.CheckpointRequest),),
        errors=CHECKPOINT,
        examples=examples.INSPECT,
    ),
    Route(
        "POST",
        "/admin/v1/models/pull",
        "pullModel",
        "Administration",
        "Download a checkpoint",
        "Begins a download and answers at once with an operation to poll.",
        "admin",
        admin.pull,
        (Answer(202, "The operation.", Operation),),
        requests=(("application/json", admin.CheckpointRequest),),
        errors=(*CHECKPOINT, "insufficient_storage"),
        examples=examples.PULL,
    ),
    Route(
        "POST",
        "/admin/v1/models/load",
        "loadModel",
        "Administration",
        "Load a model",
        "Downloads the checkpoint if needed, and puts it on its device. Answers at once with an operation to poll; the "
        "same configuration again is the same operation.",
        "admin",
        admin.load,
        (Answer(202, "The operation.", Operation),),
        requests=(("application/json", ModelConfig),),
        errors=(
            *CHECKPOINT,
            "invalid_lifecycle",
            "insufficient_resources",
            "model_load_failed",
            "insufficient_storage",
        ),
        examples=examples.LOAD,
    ),
    Route(
        "POST",
        "/admin/v1/models/unload",
        "unloadModel",
        "Administration",
        "Unload a model",
        "Waits for running requests (120 seconds at most), then frees the memory.",
        "admin",
        admin.unload,
        (Answer(200, "The model's status after it.", ModelStatus),),
        requests=(("application/json", admin.ModelName),),
        errors=(*BODY, "model_not_found", "invalid_lifecycle"),
        examples=examples.UNLOAD,
    ),
    Route(
        "DELETE",
        "/admin/v1/models",
        "removeModel",
        "Administration",
        "Delete a stored checkpoint",
        "Deletes the files of a managed checkpoint that is not loaded.",
        "admin",
        admin.remove,
        (Answer(200, "It is gone.", Removed),),
        parameters=(MODEL_QUERY,),
        errors=("validation_error", "model_not_found", "invalid_lifecycle"),
    ),
    Route(
        "GET",
        "/admin/v1/operations",
        "listOperations",
        "Administration",
        "List operations",
        "All pending and running operations and the latest 256 that ended.",
        "admin",
        admin.operations,
        (Answer(200, "The operations.", list[Operation]),),
        examples=examples.OPERATIONS,
    ),
    Route(
        "GET",
        "/admin/v1/operations/{operation_id}",
        "getOperation",
        "Administration",
        "Poll an operation",
        "Answers 200 whatever became of the operation; its `error` says why one failed.",
        "admin",
        admin.operation,
        (Answer(200, "The operation.", Operation),),
        parameters=(OPERATION_PATH,),
        errors=("not_found",),
        examples=examples.OPERATION,
    ),
    Route(
        "GET",
        "/admin/v1/aliases",
        "listAliases",
        "Administration",
        "List aliases",
        "The alias table. `default` is the default model.",
        "admin",
        admin.aliases,
        (Answer(200, "The aliases.", list[Alias]),),
        examples=examples.ALIASES,
    ),
    Route(
        "GET",
        "/admin/v1/aliases/{alias}",
        "getAlias",
        "Administration",
        "Read an alias",
        "The model that an alias names.",
        "admin",
        admin.alias,
        (Answer(200, "The alias.", Alias),),
        parameters=(ALIAS_PATH,),
        errors=("not_found",),
    ),
    Route(
        "PUT",
        "/admin/v1/aliases/{alias}",
        "setAlias",
        "Administration",
        "Set an alias",
        "Points an alias at a model, whether it existed before or not.",
        "admin",
        admin.set_alias,
        (Answer(200, "The alias.", Alias),),
        requests=(("application/json", admin.ModelName),),
        parameters=(ALIAS_PATH,),
        errors=(*BODY, "model_not_found"),
        examples=examples.SET_ALIAS,
    ),
    Route(
        "DELETE",
        "/admin/v1/aliases/{alias}",
        "deleteAlias",
        "Administration",
        "Delete an alias",
        "Removes an alias; the model stays.",
        "admin",
        admin.delete_alias,
        (Answer(200, "The alias as it was.", Alias),),
        parameters=(ALIAS_PATH,),
        errors=("not_found",),
    ),
)
