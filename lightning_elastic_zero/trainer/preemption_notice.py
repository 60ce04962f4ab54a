"""Notices, beside a signal, that a machine is going to be taken away.

Each notice is a function without arguments that says whether there is one yet. What cannot be
asked has no notice: a metadata server that does not answer must not end a run.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TypeAlias

Notice: TypeAlias = Callable[[], bool]
"""Whether the machine is going to be taken away."""

AWS = "http://169.254.169.254"
"""Of the instance metadata service, version 2 (Amazon EC2 User Guide, "Spot Instance interruption
notices"): 404 until two minutes before, then a document."""

GCP = "http://metadata.google.internal"
"""Of the metadata server (Compute Engine, "Preemptible and Spot VMs"): FALSE until 30 s before."""

_ANSWER_S = 2.0
"""How long an answer may take; metadata servers answer within milliseconds."""

_TOKEN_S = 21600


@dataclass(frozen=True)
class FileNotice:
    """A file that is there, as a host's daemon or a scheduler's script puts it."""

    path: str

    def __call__(self) -> bool:
        """Whether it is there."""
        return Path(self.path).exists()


@dataclass(frozen=True)
class UrlNotice:
    """A URL that answers with success, and not with ``FALSE`` or ``NONE``."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    def __call__(self) -> bool:
        """Whether it answers so."""
        answer = _answer(self.url, dict(self.headers))
        return answer is not None and answer.strip().upper() not in {"FALSE", "NONE"}


@dataclass(frozen=True)
class AwsNotice:
    """What AWS says of a spot instance, to who has asked for a token."""

    server: str = AWS

    def __call__(self) -> bool:
        """Whether the machine is going to be taken away."""
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = _answer(f"{self.server}/latest/api/token", seconds, "PUT")
        if token is None:
            return False
        headers = {"X-aws-ec2-metadata-token": token}
        return _answer(f"{self.server}/latest/meta-data/spot/instance-action", headers) is not None


def gcp_notice(server: str = GCP) -> UrlNotice:
    """Return what Google Cloud says of a machine."""
    url = f"{server}/computeMetadata/v1/instance/preempted"
    return UrlNotice(url, (("Metadata-Flavor", "Google"),))


def notice_of(source: str) -> Notice:
    """Return the notice that an option names: ``aws``, ``gcp``, a URL or a file's path."""
    if source == "aws":
        return AwsNotice()
    if source == "gcp":
        return gcp_notice()
    if source.startswith(("http://", "https://")):
        return UrlNotice(source)
    return FileNotice(source)


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return what a server answers with success, None if it does not."""
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - the user's
    # No proxy: a link-local address is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return str(answer.read(65536).decode(errors="replace"))
    except (OSError, HTTPException, ValueError):  # also HTTPError, URLError and timeouts
        return None
