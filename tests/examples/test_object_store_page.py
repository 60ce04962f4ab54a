"""The blocks of docs/object-stores.md, run unchanged against an S3 server on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_stories import run_page
from tests.support.forked_python import forked_programs
from tests.support.ranks import ForkServer
from tests.support.store_servers import make_bucket, s3_environment

pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")


@pytest.mark.long
@pytest.mark.engine
def test_the_page_runs_unchanged(
    fork_server: ForkServer, moto_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run resumes on one device; the bucket has a link and the kept checkpoints."""
    make_bucket(moto_port, "my-bucket")
    environment = s3_environment(f"http://127.0.0.1:{moto_port}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "page"
    folder.mkdir()
    with forked_programs(fork_server, tmp_path / "programs") as programs:
        output = run_page("object-stores.md", folder, programs)
    assert re.search(r"saved on 2 devices with ZeRO-3\) on 1 device at step 4, epoch 1\b", output)
    assert "ZeRO-3 on 2 devices" in output
    assert not list(folder.glob("s3:*")), "a local folder was made of the URL"
    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"])
    found = client.list_objects_v2(Bucket="my-bucket", Prefix="run/", Delimiter="/")
    names = [each["Prefix"].split("/")[1] for each in found["CommonPrefixes"]]
    # The best two of each run, and the checkpoint from which the second run resumed.
    kept = ["last.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert sorted(re.sub("epoch=.*-", "", name) for name in names) == kept
    assert "Contents" not in found, "an owner object was left"
