"""Why the hub did not give a model, and what to do: gated, private, missing, a wrong token, no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sakuradite.errors import (
    APIError,
    HubUnavailableError,
    ModelAccessDeniedError,
    ModelNotFoundError,
    OfflineMissingError,
)


@contextmanager
def hub_errors(endpoint: str, token: str | None, model: str, revision: str) -> Iterator[None]:
    """Turn what huggingface_hub raises about a model into errors that tell the caller what to do. `token` is an
    explicit one; one that huggingface_hub finds by itself counts too.
    """
    try:
        yield
    except OfflineModeIsEnabled:
        raise OfflineMissingError(f"HF_HUB_OFFLINE is set, and {model} was to be fetched") from None
    except HfHubHTTPError as error:
        raise _refusal(error, endpoint, (token or get_token()) is not None, model, revision) from None
    except httpx2.HTTPError as error:
        raise HubUnavailableError(
            f"{endpoint} cannot be reached ({str(error) or type(error).__name__}). Check the network, a proxy "
            "(HTTPS_PROXY) or HF_ENDPOINT; with offline=True (--offline) only files that are already here are used."
        ) from None


def _refusal(error: HfHubHTTPError, endpoint: str, token: bool, model: str, revision: str) -> APIError:
    """The error that tells a caller what to do about the hub's answer."""
    status, page = error.response.status_code, f"{endpoint}/{model}"
    told = error.response.headers.get("x-error-message", "")
    where = "on the machine that downloads (the daemon's, where one runs)"
    if isinstance(error, GatedRepoError):
        step = (
            "the token that is set has no access yet: with its account"
            if token
            else f"no token is set: put one with read access into HF_TOKEN, or run `hf auth login`, {where}, and"
        )
        return ModelAccessDeniedError(f"{model} is gated, and {step} accept the terms at {page}.", param="model")
    if status == 401 and token and "RepoNotFound" not in error.response.headers.get("x-error-code", ""):
        return ModelAccessDeniedError(
            f"The hub does not accept the token that is set. Replace HF_TOKEN, or run `hf auth login` again, "
            f"{where}; a public model needs none.",
            param="model",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(
            f"{model} has no revision {revision!r}; its branches and tags are at {page}/tree/main", param="revision"
        )
    if isinstance(error, EntryNotFoundError):
        return ModelNotFoundError(f"{model} at {revision}: a file that it lists is missing from the hub")
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        private = (
            "or it is private and the token that is set does not see it"
            if token
            else f"or it is private (then put a token into HF_TOKEN, or run `hf auth login`, {where})"
        )
        return ModelNotFoundError(
            f"The hub has no model {model!r}: check the spelling at {endpoint}/models, {private}.",
            param="model",
        )
    if isinstance(error, DisabledRepoError) or status == 403:
        return ModelAccessDeniedError(
            f"The hub refuses {model} ({told or 'forbidden'}). Check the token's permissions and {page}.",
            param="model",
        )
    after = error.response.headers.get("retry-after", "")
    return HubUnavailableError(
        f"{endpoint} answered {status} {told}".strip() + "; try again later",
        retry_after=float(after) if after.isdigit() else None,
    )
