"""Error bodies: one for the native and OpenAI dialects, one for System One, and the headers that go with a status."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson

from sakuradite.errors import APIError, FieldProblem, InternalError, place_of
from sakuradite.http.exchange import Reply

logger = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
SYSTEM_ONE_TYPES = {
    401: "authentication_error",
    413: "max_tokens_exceeded",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
DEFAULT_RETRY_AFTER = 1.0  # seconds, where waiting helps and nobody knows how long


def native(error: APIError) -> Reply:
    """`{"error": {"code", "message", "type", "param"}}`, with `detail` beside it on a 422."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"error": {"code": error.code, "message": error.message, "type": kind, "param": error.param}}
    if error.status == 422:
        body["detail"] = _detail(error)
    return Reply(error.status, orjson.dumps(body), headers=_headers(error))


def system_one(error: APIError) -> Reply:
    """`{"detail": [...]}` and nothing beside it on a 422, else `{"detail": {"error_type", "message"}}`.

    Every 4xx without a type of its own is `api_usage_error`, every such 5xx `api_error`; an unknown model is 400.
    """
    status = 400 if error.code == "model_not_found" else error.status
    if status == 422:
        return Reply(status, orjson.dumps({"detail": _detail(error)}), headers=_headers(error))
    kind = SYSTEM_ONE_TYPES.get(status, "api_error" if status >= 500 else "api_usage_error")
    body = orjson.dumps({"detail": {"error_type": kind, "message": error.message}})
    return Reply(status, body, headers=_headers(error))


def _detail(error: APIError) -> list[dict[str, Any]]:
    problems = error.detail or (FieldProblem(("body",), error.message, error.code),)
    return [{"loc": list(p.loc), "msg": p.msg, "type": p.type} for p in problems]


def _headers(error: APIError) -> tuple[tuple[bytes, bytes], ...]:
    headers: list[tuple[bytes, bytes]] = []
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 429 or (error.status == 503 and error.retryable):
        seconds = DEFAULT_RETRY_AFTER if error.retry_after is None else error.retry_after
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
    if not error.retryable and (error.status >= 500 or error.status == 409):
        headers.append((b"x-should-retry", b"false"))  # the openai client would send it again
    return tuple(headers)


def unexpected(error: Exception, request_id: str) -> InternalError:
    """The answer to a defect of ours. The log gets its type and place, not its text, which may quote the request."""
    logger.error("%s", place_of(error), extra={"request_id": request_id})
    return InternalError("an internal error; the server's log has its place under this request id")
