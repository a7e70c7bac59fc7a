"""The error tree: what a caller can catch, and the record that carries an error between processes.

    SakuraditeError
    ├── MissingExtraError     a part of the package that was not installed
    ├── ClosedError           the client was closed, before the call or during it
    ├── TransportError        no complete answer came: connection, time-out, truncated stream
    └── APIError              an answer that says no; one subclass for each code of the contract
        ├── ConfigurationError, InvalidRequestError                              400
        ├── UnauthorizedError                                                    401
        ├── ModelAccessDeniedError, ForbiddenError                               403
        ├── ModelNotFoundError, NotFoundError                                    404
        ├── MethodNotAllowedError                                                405
        ├── InvalidLifecycleError, OfflineMissingError, CancelledOperationError  409
        ├── RequestTooLargeError, ContextExceededError                           413
        ├── UnsupportedMediaTypeError                                            415
        ├── ValidationError, UnsupportedModelError, InsufficientResourcesError   422
        ├── CapacityExceededError                                                429
        ├── InferenceFailedError, InternalError                                  500
        ├── HubUnavailableError                                                  502
        ├── ModelLoadingError, ModelLoadFailedError, ReplicaUnavailableError,
        │   InterruptedOperationError                                            503
        ├── RequestTimeoutError                                                  504
        └── InsufficientStorageError                                             507

Inside the cluster an error travels as an `ErrorRecord`, a value: Ray wraps exceptions, and one bad row must not
fail its batch. A message names the field, the limit, the value seen and what to do; it never holds request content.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One entry of a 422's `detail`: where in the request, what is wrong, and a machine-readable type."""

    loc: tuple[str | int, ...]
    msg: str
    type: str


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An API error as a plain value. `param` is the dotted path of the offending field, `retry_after` is in seconds."""

    code: str
    status: int
    message: str
    param: str | None = None
    detail: tuple[FieldProblem, ...] = ()
    retry_after: float | None = None


class SakuraditeError(Exception):
    """Everything this package raises on purpose."""


class MissingExtraError(SakuraditeError):
    """An optional part is needed and not installed; the message names the extra."""

    def __init__(self, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the extra [{extra}]: pip install 'sakuradite[{extra}]'")
        self.purpose, self.extra = purpose, extra

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.purpose, self.extra)


class ClosedError(SakuraditeError):
    """The client was closed, before the call or during it. A closed client cannot be reopened."""


class TransportError(SakuraditeError):
    """No complete answer came. `sent` tells whether the request may have reached the server."""

    def __init__(self, message: str, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.sent)


class APIError(SakuraditeError):
    """The server (or the embedded engine) answered with an error.

    `code` and `status` follow the wire contract, `param` is the path of the offending field, `detail` lists every
    field of a 422, `retry_after` is in seconds. `retryable` says whether the same request may succeed later.
    """

    code: str = "internal_error"
    status: int = 500
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        detail: Sequence[FieldProblem] = (),
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.detail = tuple(detail)
        self.retry_after = retry_after
        self.request_id = request_id

    def record(self) -> ErrorRecord:
        """The same error as a plain value."""
        return ErrorRecord(self.code, self.status, self.message, self.param, self.detail, self.retry_after)

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_record, (self.record(), self.request_id)


class ConfigurationError(APIError):
    """The program was set up in a way that cannot work."""

    code, status = "configuration_error", 400


class InvalidRequestError(APIError):
    """The request contradicts itself or the protocol."""

    code, status = "invalid_request", 400


class UnauthorizedError(APIError):
    """The key is missing or wrong."""

    code, status = "unauthorized", 401


class ModelAccessDeniedError(APIError):
    """A gated or private model, and no access to it."""

    code, status = "model_access_denied", 403


class ForbiddenError(APIError):
    """The caller may not speak to this server."""

    code, status = "forbidden", 403


class ModelNotFoundError(APIError):
    """The model is not resident, or the hub has none of that name."""

    code, status = "model_not_found", 404


class NotFoundError(APIError):
    """No such route or operation."""

    code, status = "not_found", 404


class MethodNotAllowedError(APIError):
    """The route exists, the method does not."""

    code, status = "method_not_allowed", 405


class InvalidLifecycleError(APIError):
    """The model is not in a state that allows this."""

    code, status = "invalid_lifecycle", 409


class OfflineMissingError(APIError):
    """Offline, and the files are not in the local store."""

    code, status = "offline_missing", 409


class CancelledOperationError(APIError):
    """The operation was cancelled by an unload or a shutdown."""

    code, status = "cancelled", 409


class RequestTooLargeError(APIError):
    """The body is over the size limit."""

    code, status = "request_too_large", 413


class ContextExceededError(APIError):
    """A question does not fit the model's context."""

    code, status = "context_exceeded", 413


class UnsupportedMediaTypeError(APIError):
    """The content type or encoding is not understood."""

    code, status = "unsupported_media_type", 415


class ValidationError(APIError):
    """The request does not follow the schema."""

    code, status = "validation_error", 422


class UnsupportedModelError(APIError):
    """The checkpoint cannot do what was asked."""

    code, status = "unsupported_model", 422


class InsufficientResourcesError(APIError):
    """The cluster does not have what the model asks for."""

    code, status = "insufficient_resources", 422


class CapacityExceededError(APIError):
    """The queue is full."""

    code, status, retryable = "capacity_exceeded", 429, True


class InferenceFailedError(APIError):
    """The forward pass failed on this row."""

    code, status = "inference_failed", 500


class InternalError(APIError):
    """A defect of ours."""

    code, status = "internal_error", 500


class HubUnavailableError(APIError):
    """The hub cannot be reached."""

    code, status, retryable = "hub_unavailable", 502, True


class ModelLoadingError(APIError):
    """The model is on its way."""

    code, status, retryable = "model_loading", 503, True


class ModelLoadFailedError(APIError):
    """The model could not be loaded."""

    code, status = "model_load_failed", 503


class ReplicaUnavailableError(APIError):
    """The replica died or is restarting."""

    code, status, retryable = "replica_unavailable", 503, True


class InterruptedOperationError(APIError):
    """The operation was cut off by a crash or a restart."""

    code, status, retryable = "interrupted", 503, True


class RequestTimeoutError(APIError):
    """The deadline passed."""

    code, status, retryable = "request_timeout", 504, True


class InsufficientStorageError(APIError):
    """The disk is too small for the download."""

    code, status = "insufficient_storage", 507


class _Codes:
    """The subclasses by code, found once."""

    by_code: ClassVar[dict[str, type[APIError]]] = {c.code: c for c in APIError.__subclasses__()}


def error_from_record(record: ErrorRecord, request_id: str | None = None) -> APIError:
    """The exception of a record: the class of its code, or `APIError` itself for a code this version does not know."""
    kind = _Codes.by_code.get(record.code, APIError)
    error = kind(
        record.message, param=record.param, detail=record.detail, retry_after=record.retry_after, request_id=request_id
    )
    if kind is APIError or kind.status != record.status:
        error.code, error.status = record.code, record.status
        error.retryable = kind.retryable or record.status in (429, 502, 503, 504)
    return error


def error_from_code(code: str, message: str, **fields: Any) -> APIError:
    """The exception for a code of the contract."""
    return _Codes.by_code[code](message, **fields)


OF_THE_ROW = frozenset(
    {
        "validation_error",
        "request_too_large",
        "context_exceeded",
        "inference_failed",
        "internal_error",
        "request_timeout",
    }
)
"""Codes that say something of one state of many; every other failure would meet the next one as well."""


def place_of(error: BaseException) -> str:
    """What a log may say of a defect in the path of a request: type and traceback, those of its cause too. The text may
    quote the request.
    """
    place = f"{type(error).__qualname__}\n{''.join(traceback.format_tb(error.__traceback__))}"
    return place if error.__cause__ is None else f"{place_of(error.__cause__)}which caused {place}"
