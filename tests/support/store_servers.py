"""Emulators of object stores on this machine, each in its own process group."""

from __future__ import annotations

import base64
import hmac
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.request import Request, urlopen

from tests.support.processes import HANG_TIMEOUT_S, free_port

T = TypeVar("T")

AZURITE_FOLDER = Path(__file__).parents[2] / ".cache" / "azurite"
"""Where ``npm install --prefix`` puts azurite; ``$PATH`` is searched first."""

AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The account that azurite documents, which is the same everywhere."""


@contextmanager
def moto_server(log: Path) -> Iterator[int]:
    """Yield the port of an S3 server that holds its objects in memory."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    # Real stores refuse parts below 5 MiB. Small ones make small states multipart uploads.
    with _running(command, port, log, {"S3_UPLOAD_PART_MIN_SIZE": "256"}):
        yield port


def azurite_command() -> str | None:
    """Return the program that serves Azure blobs; None if it is not installed."""
    folders = os.pathsep.join(
        [os.environ.get("PATH", ""), str(AZURITE_FOLDER / "node_modules/.bin")]
    )
    return shutil.which("azurite-blob", path=folders)


@contextmanager
def azurite_server(program: str, log: Path) -> Iterator[int]:
    """Yield the port of an Azure blob server that holds its objects in memory."""
    port = free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    with _running(command, port, log):
        yield port


def s3_environment(endpoint: str) -> Mapping[str, str]:
    """Return the environment variables with which an S3 client uses a server on this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def azure_environment(endpoint: str) -> Mapping[str, str]:
    """Return the environment variables with which an Azure client uses azurite."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{AZURITE_ACCOUNT}",
    }


def make_container(port: int, name: str) -> None:
    """Create a container on azurite, with a request signed by the account's key."""
    date = formatdate(usegmt=True)
    path = f"/{AZURITE_ACCOUNT}/{name}"
    headers = f"x-ms-date:{date}\nx-ms-version:2021-12-02"
    signed = f"PUT{chr(10) * 12}{headers}\n/{AZURITE_ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(AZURITE_KEY), signed.encode(), "sha256")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request(
            "PUT",
            f"{path}?restype=container",
            headers={
                "Authorization": f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}",
                "Content-Length": "0",
                "x-ms-date": date,
                "x-ms-version": "2021-12-02",
            },
        )
        response = connection.getresponse()
        assert response.status == HTTPStatus.CREATED, response.read()


def make_bucket(port: int, name: str) -> None:
    """Create a bucket on moto."""
    import boto3

    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106 - moto does not check it
        region_name="us-east-1",
    ).create_bucket(Bucket=name)


def require_credentials(port: int) -> Mapping[str, str]:
    """Make moto check credentials; return those of a user with all permissions in S3."""
    import boto3

    of_test = s3_environment(f"http://127.0.0.1:{port}")
    iam = boto3.client(
        "iam",
        endpoint_url=of_test["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106 - moto does not check it yet
        region_name="us-east-1",
    )
    iam.create_user(UserName="user")
    allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName="user")["AccessKey"]
    reset = f"{of_test['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    with urlopen(Request(reset, b"0", {"Content-Type": "text/plain"})):  # noqa: S310 - http only
        pass
    return {
        **of_test,
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }


@contextmanager
def _running(
    command: list[str], port: int, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server until the context is left; wait until it answers."""
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + HANG_TIMEOUT_S
        while not _answers(port):
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, f"port {port} does not answer"
            time.sleep(0.05)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/", timeout=5):
            return True
    except OSError as error:
        # Azurite refuses unsigned requests: an HTTP status is an answer.
        return hasattr(error, "code")


def with_environment(environment: Mapping[str, str], call: Callable[[], T]) -> T:
    """Make a call in a rank with the environment variables of a store."""
    os.environ.update(environment)
    return call()
