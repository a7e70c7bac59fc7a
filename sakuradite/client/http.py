"""The HTTP transport: requests to a daemon over httpx; its answers and errors turned back into the package's own."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import httpx_sse
import orjson
from pydantic import BaseModel
from pydantic import ValidationError as PydanticValidationError

from sakuradite.answers import DecisionResult
from sakuradite.client.adapter import ThreadedTransport
from sakuradite.client.request import Decision
from sakuradite.client.transport import AnswerEvent, CompleteEvent, StreamEvent
from sakuradite.config import DEFAULT_BASE_URL, ClientSettings
from sakuradite.errors import (
    APIError,
    ConfigurationError,
    ErrorRecord,
    FieldProblem,
    RequestTimeoutError,
    TransportError,
    error_from_record,
)
from sakuradite.http.keys import read_admin_key

CONNECT_TIMEOUT = 10.0  # seconds for one try to connect
CONNECT_RETRIES = 2  # more tries where no connection was made, so nothing was sent
CONNECT_RETRY_WAIT = 0.1  # seconds, doubled with each try
RESENDS = 1  # of a decision whose connection broke: asking twice gives the same, and another router takes the port over
WRITE_TIMEOUT = 30.0  # seconds for a block of the body to be taken
PATIENCE = (
    130.0  # seconds: the default deadline of a model, and 10 for its 504 to come. Then the server is asked whether
)
PROBE_EVERY = 30.0  # it is still there, every so many seconds: a model may have a longer deadline than the default
KEEPALIVE_EXPIRY = 4.0  # seconds; below uvicorn's 5, so that the server does not close a connection as it is used again
END_WAIT = 1.0  # seconds for a stream to end after its complete event
TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT, write=WRITE_TIMEOUT)  # reading: see PATIENCE
POOL = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEPALIVE_EXPIRY)
CODES = {
    400: "invalid_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    413: "request_too_large", 415: "unsupported_media_type", 422: "validation_error", 429: "capacity_exceeded",
    503: "replica_unavailable", 504: "request_timeout",
}  # fmt: skip
"""What a status means where the body is not ours, as from a proxy in between."""

type Params = Mapping[str, str] | None
type Access = Literal["inference", "admin", "open"]


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_base_url(url: str) -> str:
    """The URL without a slash at its end. Raises ConfigurationError for what is no http(s) URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port, httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigurationError(f"base_url {url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"base_url must start with http:// or https:// and name a host, not {url!r}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigurationError("base_url must hold no user, password, query or fragment; keys have arguments")
    return url.rstrip("/")


class HTTPTransport:
    """A daemon at a base URL. Connections are kept alive and pooled; `client` is the caller's own httpx client, if any.

    Loopback never goes through a proxy, whatever the environment says; other hosts honour its proxy variables.
    """

    def __init__(self, settings: ClientSettings, client: httpx.Client | httpx.AsyncClient | None = None) -> None:
        self.settings = settings
        self.base_url = checked_base_url(settings.base_url or "")
        self._own = not isinstance(client, httpx.AsyncClient)
        if isinstance(client, httpx.AsyncClient):
            self._client = client
        elif client is not None:
            self._client = httpx.AsyncClient(transport=ThreadedTransport(client), timeout=None)
        else:
            self._client = _connection_pool(self.base_url)

    async def open(self) -> None:
        """Nothing to do: connections are made when they are needed."""

    async def close(self) -> None:
        if self._own:
            await self._client.aclose()

    async def decide(self, decision: Decision) -> DecisionResult:
        data = await within(decision.timeout, self._decided(decision.body(False)))
        result = parsed(DecisionResult, data)
        kinds = {key: answer.type for key, answer in result.answers.items()}
        if kinds != {key: question.type for key, question in decision.questions.items()}:
            raise TransportError("the server's answers do not fit the questions that were asked")
        return result.model_copy(update={"answers": {key: result.answers[key] for key in decision.questions}})

    async def _decided(self, body: bytes) -> bytes:
        """The answer to a decision, asked once more where the connection broke before all of it was here."""
        for left in reversed(range(RESENDS + 1)):
            try:
                return await self.call("POST", "/v1/decisions", "inference", body)
            except TransportError as error:
                broken = isinstance(error.__cause__, httpx.NetworkError | httpx.RemoteProtocolError) and error.sent
                if not (left and broken):
                    raise
            await asyncio.sleep(CONNECT_RETRY_WAIT)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def stream(self, decision: Decision) -> AsyncGenerator[StreamEvent]:
        clock = asyncio.get_running_loop().time
        end = None if decision.timeout is None else clock() + decision.timeout
        response = await within(
            decision.timeout, self._send("POST", "/v1/decisions", "inference", decision.body(True)), end
        )
        try:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise TransportError("the server did not answer with a stream of events")
            frames = httpx_sse.EventSource(response).aiter_sse()
            async with contextlib.aclosing(frames):
                event: StreamEvent | None = None
                while not isinstance(event, CompleteEvent):
                    frame = await within(decision.timeout, self._patiently(anext(frames, None)), end)
                    if frame is None:
                        return
                    event = _event(frame, response)
                    yield event
                with contextlib.suppress(TimeoutError):  # read to the end, the connection can be used again
                    async with asyncio.timeout(END_WAIT):
                        if await anext(frames, None) is not None:
                            raise TransportError("the stream went on after its complete event")
        except httpx.HTTPError as error:
            raise TransportError(f"the stream was cut off: {reason(error)}") from error
        finally:
            await response.aclose()

    async def call(
        self, method: str, path: str, access: Access, content: bytes | None = None, params: Params = None
    ) -> bytes:
        """The body of a successful answer. Raises APIError for what the server refuses, else TransportError."""
        response = await self._send(method, path, access, content, params)
        try:
            return await self._patiently(response.aread())
        except httpx.HTTPError as error:
            raise TransportError(f"the answer was cut off: {reason(error)}") from error
        finally:
            await response.aclose()

    async def _send(
        self, method: str, path: str, access: Access, content: bytes | None = None, params: Params = None
    ) -> httpx.Response:
        """A response with its body still to be read, its status below 300."""
        request = self._client.build_request(
            method, self.base_url + path, params=params, headers=self._headers(access), content=content, timeout=TIMEOUT
        )
        for attempt in range(CONNECT_RETRIES + 1):
            try:
                response = await self._patiently(self._client.send(request, stream=True, follow_redirects=False))
                break
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if attempt == CONNECT_RETRIES:
                    raise self._unreachable(error) from error
            except httpx.HTTPError as error:
                raise TransportError(f"no answer from {self.base_url}: {reason(error)}") from error
            await asyncio.sleep(CONNECT_RETRY_WAIT * 2**attempt)
        if response.status_code < 300:
            return response
        try:
            body = await response.aread()
        except httpx.HTTPError as error:
            raise TransportError(f"the answer was cut off: {reason(error)}") from error
        finally:
            await response.aclose()
        raise self._refusal(response, body, access)

    def _headers(self, access: Access) -> dict[str, str]:
        """The headers of a request, with the key of its kind; the two keys are never interchanged."""
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        key = {"inference": self.settings.api_key, "admin": self.settings.admin_key, "open": None}[access]
        if access == "admin" and key is None and self.base_url == DEFAULT_BASE_URL:
            key = read_admin_key(self.settings.home)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return headers

    async def _patiently[T](self, work: Awaitable[T]) -> T:
        """The result of a wait for the server. How long is up to the server, as long as it is there at all."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait([task], timeout=PATIENCE)
            while not done:
                await self._probe()
                done, _ = await asyncio.wait([task], timeout=PROBE_EVERY)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _probe(self) -> None:
        try:
            await self._client.get(self.base_url + "/healthz", timeout=PROBE_EVERY, follow_redirects=False)
        except httpx.HTTPError as error:
            message = f"{self.base_url} took over {PATIENCE:g} seconds and no longer answers: {reason(error)}"
            raise TransportError(message) from error

    def _unreachable(self, error: httpx.HTTPError) -> TransportError:
        hint = "; is the daemon running? Start it with: sakuradite serve" if is_loopback(self.base_url) else ""
        return TransportError(f"cannot reach {self.base_url}: {reason(error)}{hint}", sent=False)

    def _refusal(self, response: httpx.Response, body: bytes, access: Access) -> APIError | TransportError:
        """The exception of an answer that is no success."""
        if response.status_code < 400:
            place = response.headers.get("location", "nowhere")
            return TransportError(f"{self.base_url} redirects to {place}; set base_url to where the daemon is")
        record = _error_record(response, body)
        if record.status == 401:
            name, variable = (
                ("admin_key", "SAKURADITE_ADMIN_KEY") if access == "admin" else ("api_key", "SAKURADITE_API_KEY")
            )
            record = replace(
                record, message=f"{record.message} (the client's {name}: argument, {variable} or config.toml)"
            )
        return error_from_record(record, response.headers.get("x-request-id"))


def parsed[M: BaseModel](model: type[M], data: bytes) -> M:
    """An answer of the server as its model. Raises TransportError for what is none."""
    try:
        return model.model_validate_json(data)
    except PydanticValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise TransportError(f"the server's answer is not a {model.__name__}: {where}: {first['msg']}") from None


async def within[T](
    timeout: float | None,
    work: Awaitable[T],
    end: float | None = None,
    what: str = "a complete answer",
) -> T:
    """The result of some work by a deadline: `end` in the loop's time, else `timeout` seconds from now."""
    if end is None and timeout is not None:
        end = asyncio.get_running_loop().time() + timeout
    try:
        async with asyncio.timeout_at(end):
            return await work
    except TimeoutError:
        raise RequestTimeoutError(f"waited {timeout:.3g} seconds in vain for {what}") from None


def reason(error: BaseException) -> str:
    """What went wrong with a connection, in the system's words where it has any."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[0]
        if isinstance(seen, socket.gaierror):
            return str(seen.strerror)
        if isinstance(seen, OSError) and seen.errno:
            return os.strerror(seen.errno)
        seen = seen.__cause__ or seen.__context__
    return str(error) or type(error).__name__


def _connection_pool(base_url: str) -> httpx.AsyncClient:
    try:
        return httpx.AsyncClient(limits=POOL, timeout=TIMEOUT, trust_env=not is_loopback(base_url))
    except ImportError:  # httpx's words for it name pip, not what the user set
        raise ConfigurationError(
            "the environment names a SOCKS proxy (ALL_PROXY or the like), which needs: pip install 'httpx[socks]'"
        ) from None


def _event(frame: httpx_sse.ServerSentEvent, response: httpx.Response) -> StreamEvent:
    """The event of one frame. An error event is raised; anything unknown is a TransportError."""
    try:
        payload: Any = orjson.loads(frame.data)
    except orjson.JSONDecodeError:
        raise TransportError("the stream holds a frame that is not JSON") from None
    if not isinstance(payload, dict) or payload.get("type") != frame.event:
        raise TransportError("the stream holds a frame whose type is not its event's name")
    match frame.event:
        case "answer":
            return parsed(AnswerEvent, frame.data.encode())
        case "complete":
            return parsed(CompleteEvent, frame.data.encode())
        case "error":
            raise error_from_record(_wire_error(payload, 500), response.headers.get("x-request-id"))
    raise TransportError("the stream holds an event of an unknown type")


def _error_record(response: httpx.Response, body: bytes) -> ErrorRecord:
    """The record of an error answer; one without our body is told by its status."""
    status = response.status_code
    try:
        payload = orjson.loads(body)
        record = _wire_error(payload["error"], status, payload.get("detail") or ())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        kind = response.headers.get("content-type", "no content type").partition(";")[0]
        message = f"{status} {response.reason_phrase}, and not from Sakuradite ({kind}): is this the daemon's URL?"
        record = ErrorRecord(CODES.get(status, f"http_{status}"), status, message)
    return replace(record, retry_after=_retry_after(response.headers.get("retry-after")))


def _wire_error(error: Mapping[str, Any], status: int, detail: Sequence[Mapping[str, Any]] = ()) -> ErrorRecord:
    problems = tuple(FieldProblem(tuple(p["loc"]), str(p["msg"]), str(p["type"])) for p in detail)
    status = int(error.get("status_code", status))
    return ErrorRecord(str(error["code"]), status, str(error["message"]), error.get("param"), problems)


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
