"""A rank of ``DeviceRanks``: a new process in which CUDA is not yet initialized."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys


def main(path: str, rank: str, world: str, port: str, device: str, shared: str = "") -> None:
    faulthandler.register(signal.SIGUSR1)
    # Makes cuBLAS deterministic; it is read when cuBLAS starts.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.set_num_threads(1)
    # Fills uninitialised memory with NaN. On GPUs, operations without a deterministic kernel warn.
    torch.use_deterministic_algorithms(mode=True, warn_only=device == "cuda")

    from tests.support import fork_server

    placement = fork_server.Placement(device, shared=bool(shared))
    fork_server.serve(path, int(rank), int(world), int(port), placement)


if __name__ == "__main__":
    main(*sys.argv[1:])
