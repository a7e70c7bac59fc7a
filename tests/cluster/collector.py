"""A stand-in for an OpenTelemetry collector: takes traces by OTLP over HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What came: `bodies` as they were, `spans()` decoded."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()

    def spans(self) -> list[Any]:
        """Every span so far."""
        return [span for _, span in self.spans_by_service()]

    def spans_by_service(self) -> list[tuple[dict[str, str], Any]]:
        """Every span with the attributes of the process that sent it."""
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                sender = {a.key: a.value.string_value for a in resource.resource.attributes}
                found += [(sender, span) for scope in resource.scope_spans for span in scope.spans]
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.paths.add(self.path)
            collector.bodies.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
