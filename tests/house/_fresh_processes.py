"""Fork a process per program, with torch and DeepSpeed but without Lightning and this library."""

from __future__ import annotations

import json
import os
import sys

import deepspeed  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401
import torchmetrics  # noqa: F401

NOT_IMPORTED = {"lightning", "pytorch_lightning", "lightning_elastic_zero"}


def main() -> None:
    assert not NOT_IMPORTED & set(sys.modules)
    print("ready", flush=True)
    for line in sys.stdin:
        program, path = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _redirect_output(path)
            exec(compile(program, path, "exec"), {"__name__": "__main__"})  # noqa: S102
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _redirect_output(path: str) -> None:
    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{path}.{suffix}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)


if __name__ == "__main__":
    main()
