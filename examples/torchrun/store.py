"""Host the rendezvous store of torchrun's agents, on a machine that does not train.

    python examples/torchrun/store.py --port 29400

By default a node hosts the store, and all agents end when that node is lost. The store needs little
CPU: the job's scheduler, a login node or a small virtual machine is enough. Ctrl-C or SIGTERM ends
it.
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    parser.add_argument("--port", type=int, default=29400)
    arguments = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(
        signal.SIG_BLOCK, ends
    )  # sigwait below: either one ends it with exit code 0
    store = TCPStore(arguments.host, arguments.port, is_master=True, wait_for_workers=False)
    print(f"listening for agents on port {store.port}", flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    main()
