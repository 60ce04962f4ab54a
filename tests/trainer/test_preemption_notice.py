"""Notices that a machine will be taken away, from real servers and files."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

from lightning_elastic_zero.trainer.preemption import (
    Notice,
    PreemptionCheckpoint,
    aws_notice,
    gcp_notice,
    notice_of,
    url_notice,
)
from tests.support.processes import STOP_POLL_S

TOKEN = "a-token"  # noqa: S105 - of this server alone


class Metadata(BaseHTTPRequestHandler):
    preempted = False

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token"
        lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self._answer(200 if known and lives else 400, TOKEN)

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            allowed = self.headers.get("X-aws-ec2-metadata-token") == TOKEN
            document = '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'
            self._answer((200 if type(self).preempted else 404) if allowed else 401, document)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            allowed = self.headers.get("Metadata-Flavor") == "Google"
            self._answer(200 if allowed else 403, "TRUE\n" if type(self).preempted else "FALSE\n")
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def metadata_server() -> Iterator[tuple[str, type[Metadata]]]:
    """Run a server; yield its address, and the class whose ``preempted`` it answers with."""
    handler = type("Asked", (Metadata,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serve = partial(server.serve_forever, STOP_POLL_S)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            server.shutdown()
            thread.join()


def test_metadata_servers_are_queried_as_documented() -> None:
    with metadata_server() as (address, answers):
        notices: dict[str, Notice] = {
            "aws": partial(aws_notice, address),
            "gcp": partial(gcp_notice, address),
            "url": partial(
                url_notice,
                f"{address}/computeMetadata/v1/instance/preempted",
                {"Metadata-Flavor": "Google"},
            ),
        }
        assert {name: notice() for name, notice in notices.items()} == dict.fromkeys(notices, False)
        answers.preempted = True
        assert {name: notice() for name, notice in notices.items()} == dict.fromkeys(notices, True)


def test_a_missing_answer_is_not_a_notice() -> None:
    with metadata_server() as (address, _):
        refused = notice_of(f"{address}/computeMetadata/v1/instance/preempted")  # without header
        unknown = notice_of(f"{address}/nothing")
        assert not refused()
        assert not unknown()
    assert not aws_notice(address)
    assert not gcp_notice(address)


def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    notice = notice_of(str(tmp_path / "preempted"))
    assert not notice()
    (tmp_path / "preempted").touch()
    assert notice()


@pytest.mark.parametrize("name", ["aws", "gcp", "http://127.0.0.1:1/x", "/a/file"])
def test_notices_can_be_copied_and_pickled(name: str) -> None:
    callback = pickle.loads(pickle.dumps(PreemptionCheckpoint(name)))  # noqa: S301 - from here
    assert pickle.dumps(callback._notice) == pickle.dumps(notice_of(name))


class Garbage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.wfile.write(b"garbage\n")

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_an_invalid_answer_is_not_a_notice() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Garbage) as server:
        serve = partial(server.serve_forever, STOP_POLL_S)
        threading.Thread(target=serve, daemon=True).start()
        assert not url_notice(f"http://127.0.0.1:{server.server_port}/x")
        server.shutdown()


def test_a_failing_source_is_not_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    """A failing source causes one warning, and a later notice is still received."""
    answers = [OSError(116, "Stale file handle"), RuntimeError("a user's"), True]

    def notice() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    callback, closing = PreemptionCheckpoint(notice), threading.Event()
    closing.wait = lambda timeout=None: False  # type: ignore[method-assign] # do not wait 2 s
    callback._poll(notice, closing)
    assert callback._heard.startswith("the notice of its machine on ")
    (record,) = caplog.records
    assert "is being preempted: OSError: [Errno 116] Stale file handle" in record.getMessage()
