"""An HTTP proxy between a client and an object store that injects one fault.

Requests are counted from 1 in the order in which they arrive. A fault applies to the request with a
given number, or to the nth request that matches a method and a key.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote

from tests.support.processes import STOP_POLL_S

HOP_BY_HOP = {"connection", "expect", "keep-alive", "proxy-connection", "transfer-encoding"}

STATUSES = {
    "409": (409, "ConditionalRequestConflict"),
    "412": (412, "PreconditionFailed"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}
"""Answers that the proxy gives by itself; the request does not reach the store."""

KINDS = (
    "reset",
    "response lost",
    "executed late",
    *STATUSES,
    "500 after execution",
    "slow response",
    "truncated body",
    "shortened body",
    "changed byte",
    "kill before execution",
    "kill after execution",
)
"""All faults.

``executed late`` resets the connection at once and forwards the request after ``delay_s``.
``truncated body`` closes the connection before all bytes of ``Content-Length`` were sent.
``shortened body`` sends fewer bytes than the store did, with a ``Content-Length`` that fits.
"""

BODY_FAULTS = {"truncated body", "shortened body", "changed byte"}
"""Faults that need a response with a body."""


@dataclass(frozen=True)
class Fault:
    """One fault and the requests that it applies to."""

    kind: str
    number: int = 0
    """The request's number; 0: the request is found by method and key."""
    method: str = ""
    """Pattern of the whole method; empty: any."""
    key: str = ""
    """Pattern searched in path and query; empty: any."""
    nth: int = 1
    """Number of the matching request."""
    times: int = 1
    """Number of consecutive matching requests that fail, counted from ``number`` or ``nth``."""
    delay_s: float = 2.0
    """Delay of a slow response, or of a late execution."""

    def __post_init__(self) -> None:
        """Refuse an unknown kind."""
        if self.kind not in KINDS:
            msg = f"unknown fault {self.kind!r}, expected one of {KINDS}"
            raise ValueError(msg)

    def matches(self, request: Request) -> bool:
        """Return whether a request has this fault's method and key."""
        method = not self.method or re.fullmatch(self.method, request.method)
        return bool(method and re.search(self.key, request.target))


@dataclass
class Request:
    """One request that the proxy received."""

    number: int
    method: str
    target: str
    """Path and query, unquoted."""
    sent_bytes: int
    """Bytes of the request's body."""
    received_bytes: int = 0
    """Bytes of the response's body that the client was sent."""
    status: int = 0
    """Status that the client was sent; 0: none."""
    fault: str = ""

    def __str__(self) -> str:
        """Return a line for a report."""
        fault = f" [{self.fault}]" if self.fault else ""
        return f"{self.number} {self.method} {self.target} {self.status}{fault}"


class FaultProxy:
    """Forwards requests to a store on this machine; a context manager.

    Args:
        upstream_port: the store's port.
        on_kill: called at a fault that kills the client; the connection is closed afterwards.
    """

    def __init__(self, upstream_port: int, on_kill: Callable[[], object] | None = None) -> None:
        self.upstream_port = upstream_port
        self.on_kill = on_kill
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._fault: Fault | None = None
        self._matched = 0
        self.late = threading.Lock()
        """Held until a late request was executed."""
        self.drops_conditions = False
        """Whether the store ignores the conditions of writes."""
        self.conditional = threading.Lock()
        """Held during a conditional write: moto compares and writes in two steps."""
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port = int(self._server.server_address[1])
        serve = partial(self._server.serve_forever, STOP_POLL_S)
        self._thread = threading.Thread(target=serve, daemon=True)

    def __enter__(self) -> FaultProxy:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """The endpoint that clients connect to."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Request]:
        """Requests since the last ``reset``."""
        with self._lock:
            return list(self._requests)

    @property
    def injected(self) -> list[Request]:
        """Requests since the last ``reset`` to which the fault was applied."""
        return [request for request in self.requests if request.fault]

    def reset(self, fault: Fault | None = None) -> None:
        """Forget all requests, and inject a fault from now on."""
        with self._lock:
            self._requests, self._fault, self._matched = [], fault, 0

    def counts(self) -> Counter[str]:
        """Return the number of requests by method."""
        return Counter(request.method for request in self.requests)

    def bytes_by_method(self) -> Counter[str]:
        """Return the bytes of request and response bodies by method."""
        found: Counter[str] = Counter()
        for request in self.requests:
            found[request.method] += request.sent_bytes + request.received_bytes
        return found

    def _arrived(self, method: str, target: str, sent_bytes: int) -> tuple[Request, Fault | None]:
        with self._lock:
            request = Request(len(self._requests) + 1, method, unquote(target), sent_bytes)
            self._requests.append(request)
            fault = self._fault
            if fault is None:
                return request, None
            place, first = request.number, fault.number
            if not fault.number:
                if not fault.matches(request):
                    return request, None
                self._matched += 1
                place, first = self._matched, fault.nth
            if not first <= place < first + fault.times:
                return request, None
            request.fault = fault.kind
            return request, fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about clients that died."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""

    def _forward(self) -> None:
        body = b"".join(self._body())
        request, fault = self.proxy._arrived(self.command, self.path, len(body))
        kind = fault.kind if fault else ""
        if kind == "reset":
            self._reset()
            return
        if kind == "kill before execution":
            self._kill()
            return
        if kind in STATUSES:
            self._answer(request, *STATUSES[kind])
            return
        if fault and kind == "executed late":
            with self.proxy.late:
                self._reset()
                time.sleep(fault.delay_s)
                self._ask_store(body)
            return
        if fault and kind == "slow response":
            time.sleep(fault.delay_s)
        status, reason, headers, answer = self._ask_store(body)
        if kind == "response lost":
            self._reset()
            return
        if kind == "kill after execution":
            self._kill()
            return
        if kind == "500 after execution":
            self._answer(request, 500, "InternalError")
            return
        length = len(answer)
        if kind in BODY_FAULTS and (self.command == "HEAD" or not answer):
            request.fault = ""
        elif kind == "truncated body":
            answer = answer[: length // 2]
        elif kind == "shortened body":
            answer = answer[: length // 2]
            length = len(answer)
        elif kind == "changed byte":
            middle = length // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        request.status, request.received_bytes = status, len(answer)
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        stored = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", stored if self.command == "HEAD" else str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)
        if length != len(answer):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _forward  # noqa: N815 (http.server)

    def _body(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        elif length := int(self.headers.get("Content-Length") or 0):
            yield self.rfile.read(length)

    def _ask_store(self, body: bytes) -> tuple[int, str, list[tuple[str, str]], bytes]:
        store = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream_port, timeout=60)
        is_conditional = any(name in self.headers for name in ("If-Match", "If-None-Match"))
        dropped = {"if-match", "if-none-match"} if self.proxy.drops_conditions else set()
        one_by_one = self.proxy.conditional if is_conditional else nullcontext()
        with suppress(OSError), closing(store), one_by_one:
            store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP | {"content-length"} | dropped:
                    store.putheader(name, value)
            if body or self.command in {"PUT", "POST", "PATCH"}:
                store.putheader("Content-Length", str(len(body)))
            store.endheaders(body or None)
            response = store.getresponse()
            answer = response.read()
            return response.status, response.reason, response.getheaders(), answer
        return 502, "Bad Gateway", [], b""

    def _answer(self, request: Request, status: int, code: str) -> None:
        """Answer like S3, without the store."""
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        request.status, request.received_bytes = status, len(text)
        self.send_response_only(status, code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _kill(self) -> None:
        if self.proxy.on_kill is not None:
            self.proxy.on_kill()
        self._reset()

    def _reset(self) -> None:
        """Close the connection by RST."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.shutdown(socket.SHUT_RD)
        self.rfile.close()
        with suppress(OSError):
            self.connection.close()
