"""Where a machine is told that it is going to be taken away, beside a signal.

Each notice is a function without arguments that says whether there is one yet. What cannot be
asked has no notice: a metadata server that does not answer must not end a run.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

Notice: TypeAlias = Callable[[], bool]
"""Return whether the machine is going to be taken away."""

AWS = "http://169.254.169.254"
"""Of the instance metadata service, version 2 (Amazon EC2 User Guide, "Spot Instance interruption
notices"): 404 until two minutes before, then a document."""

GCP = "http://metadata.google.internal"
"""Of the metadata server (Compute Engine, "Preemptible and Spot VMs"): FALSE until 30 s before."""

_ANSWER_S = 2.0
"""How long an answer may take; metadata servers answer within milliseconds."""

_TOKEN_S = 21600


def notice_of(source: str) -> Notice:
    """Return the notice that an option names: ``aws``, ``gcp``, a URL or a file's path."""
    if source == "aws":
        return aws_notice()
    if source == "gcp":
        return gcp_notice()
    if source.startswith(("http://", "https://")):
        return url_notice(source)
    return file_notice(source)


def file_notice(path: str) -> Notice:
    """Return whether a file is there, as a host's daemon or a scheduler's script puts it."""
    return Path(path).exists


def url_notice(url: str, headers: Mapping[str, str] | None = None) -> Notice:
    """Return whether a URL answers with success, and not with ``FALSE`` or ``NONE``."""

    def is_told() -> bool:
        answer = _answer(url, dict(headers or {}))
        return answer is not None and answer.strip().upper() not in {"FALSE", "NONE"}

    return is_told


def gcp_notice(server: str = GCP) -> Notice:
    """Return whether Google Cloud is going to take the machine away."""
    url = f"{server}/computeMetadata/v1/instance/preempted"
    return url_notice(url, {"Metadata-Flavor": "Google"})


def aws_notice(server: str = AWS) -> Notice:
    """Return whether AWS is going to take the spot instance away."""

    def is_told() -> bool:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        token = _answer(f"{server}/latest/api/token", seconds, "PUT")
        if token is None:
            return False
        headers = {"X-aws-ec2-metadata-token": token}
        return _answer(f"{server}/latest/meta-data/spot/instance-action", headers) is not None

    return is_told


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return what a server answers with success, None if it does not."""
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - the user's
    # No proxy: a link-local address is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return str(answer.read(65536).decode(errors="replace"))
    except OSError:  # also HTTPError, URLError and timeouts
        return None
