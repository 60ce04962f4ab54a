"""How nodes read and write each other's files: HTTP with the standard library, both sides.

::

    GET    /file/<key>    Range: bytes=<start>-<stop - 1>
    GET    /below/<key>   -> [[key, size in bytes, modified in ns], ...]
    PUT    /part/<key>    X-Start, and X-Size with the last part: it gives the file its name
    PUT    /small/<key>   X-Digest. Checksums (``.sums``) are compared with what has arrived.
    PUT    /name/<key>    X-Modified
    POST   /delete/       X-Modified. [key, ...]
    POST   /damage/<key>  a read has found that this node's file is damaged

Each request has the token of its world, which rank 0 draws and the job's store distributes. It
prevents accidents: other runs and other users of a cluster neither read, write nor delete through a
server. It does not protect against somebody who can read the job's network traffic or its store.
Names are changed only while this world owns the node (``NodeFiles.changing``), and in the order in
which rank 0 asked: a request that it has given up must not undo a later one.
"""

from __future__ import annotations

import errno
import hmac
import http.client
import http.server
import json
import os
import re
import select
import socket
import threading
import urllib.parse
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message

from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.node_files import NodeFile, NodeFiles, digest_of
from lightning_elastic_zero.storage.node_names import is_name

TIMEOUT_S = 20.0
"""Timeout for bytes of the other side; less than the stall timeout (50 s) of a step."""

IDLE_S = 120.0
"""After this time a server closes a connection without requests."""

MOST_SMALL_BYTES = 1 << 30
"""Largest object that is sent as a whole, such as a manifest."""

_BUFFER_BYTES = 1 << 20

_POLL_S = 0.1
"""Interval at which a server checks whether it was stopped."""

_STATUS = {
    errno.ENOENT: 404,
    errno.EACCES: 403,
    errno.ENOSPC: 507,
    errno.EDQUOT: 507,
    errno.EIO: 422,
}
_ERRNO = {404: errno.ENOENT, 403: errno.EACCES, 507: errno.ENOSPC}


class NodeServer(http.server.ThreadingHTTPServer):
    """Serves the files of this node to the other ranks of its world, in daemon threads."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, files: NodeFiles, token: str, world: str) -> None:
        """Listen at a free port of an address of this machine; ``start`` serves."""
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._connections = weakref.WeakSet[socket.socket]()
        super().__init__((address, 0), _Handler)
        _servers.add(self)
        self.files, self.world = files, world
        self.changed_ns = 0  # The time of the newest change of a name.
        self.authorization = f"Bearer {token}".encode()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="elastic-zero nodes", daemon=True
        )

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """The address of this machine."""
        return str(self.server_address[0])

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; requests under way end by themselves."""
        if self._thread.is_alive():  # Else the system had no thread, and nothing would answer.
            self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection."""
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def close_in_child(self) -> None:
        """Close the sockets in a forked process, which does not serve.

        Otherwise they would stay open after the death of this process, and other nodes would wait
        for an answer.
        """
        for each in (self.socket, *self._connections):
            with suppress(OSError):  # It is closed already.
                os.close(each.detach())  # ``close`` would wait for the files that use it.

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client reports the failed request."""


_servers = weakref.WeakSet[NodeServer]()


def _close_in_child() -> None:
    for server in list(_servers):
        server.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: NodeServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        """Print nothing."""

    def do_GET(self) -> None:
        self._serve({"file": self._send_file, "below": self._send_list})

    def do_PUT(self) -> None:
        self._serve(
            {"part": self._take_part, "small": self._take_small, "name": self._take_name},
        )

    def do_POST(self) -> None:
        self._serve({"delete": self._delete, "damage": self._note_damage})

    def _serve(self, actions: Mapping[str, Callable[[str], None]]) -> None:
        # An error may leave a part of the request unread: no other one can follow it.
        self.connection.settimeout(TIMEOUT_S)
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self.server.authorization):
            self._refuse(401, b"this is the server of another run")
            return
        kind, _, quoted = self.path[1:].partition("/")
        try:
            actions[kind](urllib.parse.unquote(quoted))
        except (TimeoutError, ConnectionError):
            self.close_connection = True
            return
        except OSError as error:
            text = str(error.strerror or error).encode()
            self._refuse(_STATUS.get(error.errno or 0, 500), text)
        except Exception as error:  # noqa: BLE001 - of a request that is not valid
            self._refuse(400, repr(error).encode())
        with suppress(OSError):
            self.connection.settimeout(IDLE_S)

    def _refuse(self, status: int, why: bytes) -> None:
        """Answer with an error, and read what the client still sends before it reads the answer.

        Closing a connection with unread bytes would reset it, and the answer would be lost.
        """
        with suppress(OSError):
            self._answer(status, why, last=True)
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(_BUFFER_BYTES):
                pass

    def _answer(self, status: int, data: bytes = b"", *, last: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if last:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    @property
    def _size_bytes(self) -> int:
        return int(self.headers["Content-Length"])

    # -- actions -----------------------------------------------------------------------------

    def _send_list(self, key: str) -> None:
        if key and not all(part not in {"", ".", ".."} for part in key.split("/")):
            raise OSError(errno.EACCES, "no such folder")
        rows = [
            [each.key, each.size_bytes, each.modified_ns] for each in self.server.files.below(key)
        ]
        self._answer(200, json.dumps(rows).encode())

    def _send_file(self, key: str) -> None:
        descriptor, status = self.server.files.open(key)
        try:
            start, stop = 0, status.st_size
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, stop = int(asked[1]), min(int(asked[2]) + 1, stop)
            self.send_response(200)
            self.send_header("Content-Length", str(max(stop - start, 0)))
            self.send_header("X-Modified", str(status.st_mtime_ns))
            self.end_headers()
            while start < stop:
                start += _send_some(self.connection, descriptor, start, stop - start)
        finally:
            os.close(descriptor)

    def _take_part(self, key: str) -> None:
        files, size_bytes = self.server.files, self._size_bytes
        start, whole = int(self.headers["X-Start"]), self.headers.get("X-Size")
        files.check_room(size_bytes)
        with files.part(key, start) as append:
            memory = memoryview(bytearray(_BUFFER_BYTES))
            while size_bytes:
                count = self.rfile.readinto(memory[: min(size_bytes, len(memory))])
                if not count:
                    raise ConnectionError
                append(memory[:count])
                size_bytes -= count
        if whole is not None:
            files.end_parts(key, int(whole))
        self._answer(204)

    def _take_small(self, key: str) -> None:
        files, data = self.server.files, self._body()
        files.write(key, data)
        if digest_of(files.read(key)[0]) != self.headers["X-Digest"]:
            raise OSError(errno.EIO, "it does not match its checksum")
        if key.endswith(SUMS_SUFFIX):
            files.check_arrived(key.removesuffix(SUMS_SUFFIX))
        self._answer(204)

    def _take_name(self, key: str) -> None:
        data = self._body()
        with self._changing([key]) as changed_ns:
            self.server.files.write_name(key, data, changed_ns)
        self._answer(204)

    def _delete(self, _: str) -> None:
        keys = json.loads(self._body())
        with self._changing(keys):
            self.server.files.delete(keys)
        self._answer(204)

    @contextmanager
    def _changing(self, keys: Collection[str]) -> Iterator[int]:
        server, changed_ns = self.server, int(self.headers["X-Modified"])
        with server.files.changing(keys, server.world):
            if any(map(is_name, keys)):  # Other ranks delete data.
                if changed_ns < server.changed_ns:
                    raise OSError(errno.EACCES, "a later change was made meanwhile")
                server.changed_ns = changed_ns
            yield changed_ns

    def _note_damage(self, key: str) -> None:
        self._body()
        self.server.files.note_damage(key)
        self._answer(204)

    def _body(self) -> bytes:
        size_bytes = self._size_bytes
        if size_bytes > MOST_SMALL_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        data = self.rfile.read(size_bytes)
        if len(data) != size_bytes:
            raise ConnectionError
        return data


def _send_some(connection: socket.socket, file: int, start: int, size_bytes: int) -> int:
    """Send a part of a file without copying it; return the number of bytes sent."""
    try:
        sent = os.sendfile(connection.fileno(), file, start, size_bytes)
    except BlockingIOError:
        if not select.select([], [connection], [], TIMEOUT_S)[1]:
            raise TimeoutError from None
        return 0
    if not sent:
        raise ConnectionError  # The file is shorter now.
    return sent


class Peer:
    """Requests to another node, from any thread. Errors are ``OSError`` and name the node."""

    def __init__(self, host: str, address: str, port: int, token: str) -> None:
        """Connect when the first request is made; ``host`` is for messages."""
        self.host = host
        self._address, self._port = address, port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._idle: deque[http.client.HTTPConnection] = deque()

    def __str__(self) -> str:
        """Return the node's name, for messages."""
        return f"node {self.host}"

    def read(self, key: str, start: int, stop: int) -> memoryview:
        """Return a range of an object; fewer bytes if it is shorter."""
        return self._ask("GET", "file", key, {"Range": f"bytes={start}-{stop - 1}"})[0]

    def get(self, key: str) -> tuple[bytes, int]:
        """Return a small object, and when it was written, in ns."""
        data, headers = self._ask("GET", "file", key)
        return bytes(data), int(headers["X-Modified"])

    def below(self, prefix: str) -> list[NodeFile]:
        """Return the objects below a key."""
        rows = json.loads(bytes(self._ask("GET", "below", prefix)[0]))
        return [NodeFile(*row) for row in rows]

    def put_part(self, key: str, file: int, start: int, stop: int, *, is_last: bool) -> None:
        """Send a range of a local file; the last one gives the copy its name."""
        headers = {"X-Start": str(start), **({"X-Size": str(stop)} if is_last else {})}
        self._ask("PUT", "part", key, headers, part=(file, start, stop))

    def put_small(self, key: str, data: bytes) -> None:
        """Write a small object. Checksums are compared with those of the parts that arrived."""
        self._ask("PUT", "small", key, {"X-Digest": digest_of(data)}, data)

    def put_name(self, key: str, data: bytes, modified_ns: int) -> None:
        """Write a name."""
        self._ask("PUT", "name", key, {"X-Modified": str(modified_ns)}, data)

    def delete(self, keys: Collection[str], changed_ns: int) -> None:
        """Delete objects."""
        headers = {"X-Modified": str(changed_ns)}
        self._ask("POST", "delete", "", headers, json.dumps(list(keys)).encode())

    def note_damage(self, key: str) -> None:
        """Report that its file is damaged."""
        self._ask("POST", "damage", key)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    # -- requests ----------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        kind: str,
        key: str,
        headers: Mapping[str, str] = {},
        data: bytes = b"",
        part: tuple[int, int, int] | None = None,
    ) -> tuple[memoryview, Message]:
        """Make a request; return the body and the headers of the answer.

        All requests may be made twice: the server may have closed an idle connection.
        """
        path = f"/{kind}/{urllib.parse.quote(key)}"
        while True:
            was_idle, connection = self._connection()
            try:
                self._send(connection, method, path, {**self._headers, **headers}, data, part)
                response = connection.getresponse()
                body = _body_of(response)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not was_idle or isinstance(error, TimeoutError):
                    why = str(error) or type(error).__name__
                    msg = f"{self} does not answer ({why})"
                    raise OSError(errno.EIO, msg) from error
            else:
                break
        if response.status in {200, 204}:
            self._idle.append(connection)
            return body, response.headers
        connection.close()
        number = _ERRNO.get(response.status, errno.EIO)
        raise OSError(number, f"{self}: {bytes(body).decode(errors='replace')}", key)

    def _connection(self) -> tuple[bool, http.client.HTTPConnection]:
        with suppress(IndexError):
            return True, self._idle.pop()
        new = http.client.HTTPConnection(self._address, self._port, timeout=TIMEOUT_S)
        return False, new

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        data: bytes,
        part: tuple[int, int, int] | None,
    ) -> None:
        file, start, stop = part or (-1, 0, len(data))
        connection.putrequest(method, path)
        for name, value in {**headers, "Content-Length": stop - start}.items():
            connection.putheader(name, str(value))
        connection.endheaders(data or None)
        while part and start < stop:
            start += _send_some(connection.sock, file, start, stop - start)


def _body_of(response: http.client.HTTPResponse) -> memoryview:
    memory, done = memoryview(bytearray(int(response.headers["Content-Length"] or 0))), 0
    while done < len(memory):
        count = response.readinto(memory[done:])
        if not count:
            raise ConnectionError
        done += count
    response.read()
    return memory
