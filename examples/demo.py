"""Kill a ZeRO-3 run in mid-epoch, resume it on other process counts, compare the loss curves.

    python examples/demo.py

A small GPT learns the source text of Python's standard library on CPU: first on 4 processes, which
are killed in the middle of an epoch; then on 2, which are killed in the middle of another; then on
3 to the end. A reference run trains on 4 processes without a stop. For comparison, two new runs on
2 and 3 processes start with only the weights of the killed runs, as users do without this library.

The demo takes a few minutes on two cores. It writes a picture of the loss curves, TensorBoard's
files, checkpoints and logs to ``demo_output/``. The exit code is 0 only if the elastic run used the
same samples in each optimizer step as the uninterrupted run, and their loss curves are equal up to
the order of floating-point sums.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time

from demo_phases import OUTPUT, STEPS_PER_EPOCH, DemoError, Phase, run_phase
from demo_report import Comparison, draw, summarize, table

EPOCHS = 4
KILLS = (30, 66)  # steps of the checkpoints that are resumed: in epochs 2 and 3, of 24 steps
END = EPOCHS * STEPS_PER_EPOCH

ON_4 = Phase("elastic", processes=4, start_step=0, stop_step=KILLS[0], epochs=EPOCHS)
ELASTIC = (
    ON_4,
    Phase("elastic", processes=2, start_step=KILLS[0], stop_step=KILLS[1], epochs=EPOCHS),
    Phase("elastic", processes=3, start_step=KILLS[1], stop_step=END, epochs=EPOCHS),
)

# A run that has only the weights repeats the interrupted epoch with a fresh optimizer, a new
# warm-up and a schedule for the remaining epochs: 3, and 2 after one and a half of them. In the end
# that is half an epoch more; the curve is drawn up to the end of the others.
WEIGHTS_ON_2 = Phase(
    "weights-only",
    processes=2,
    start_step=KILLS[0],
    stop_step=KILLS[1],
    epochs=EPOCHS - 1,
    weights_of=ON_4.checkpoint,
)
WEIGHTS_ONLY = (
    WEIGHTS_ON_2,
    Phase(
        "weights-only",
        processes=3,
        start_step=KILLS[1],
        stop_step=END,
        epochs=EPOCHS - 2,
        weights_of=WEIGHTS_ON_2.checkpoint,
    ),
)
UNINTERRUPTED = (Phase("uninterrupted", processes=4, start_step=0, stop_step=END, epochs=EPOCHS),)

# In this order, both continuations start from the checkpoint as the kill left it: a run deletes all
# but its newest two checkpoints.
PHASES = (ON_4, *WEIGHTS_ONLY, *ELASTIC[1:], *UNINTERRUPTED)
MIN_RATIO = 1000  # times; see check()


def check(comparison: Comparison) -> None:
    """Check that each phase continued from its checkpoint, and that the two runs are equal.

    On another process count, gradients are summed in another order, which changes their last bits.
    The amount depends on the processor, so the tolerance is measured here: the run with only the
    weights must deviate a thousand times more than the elastic run.

    Raises:
        DemoError: a check failed.
    """
    for phase in PHASES:
        first_step = phase.events()[0].step
        if first_step != phase.start_step:
            raise DemoError(
                f"{phase.run} on {phase.processes} processes started at step {first_step}, but the "
                f"checkpoint before it is that of step {phase.start_step}"
            )
    steps = set(range(1, END + 1))
    for name, run in comparison.runs.items():
        if set(run) != steps:
            raise DemoError(f"{name} run: steps {sorted(steps ^ set(run))} are missing or extra")
    if other := sorted(steps - comparison.same_samples("elastic")):
        raise DemoError(f"the elastic run took other samples at steps {other}")
    largest = max(comparison.difference("elastic").values())
    allowed = max(comparison.difference("weights-only").values()) / MIN_RATIO
    if not allowed > 0:
        raise DemoError("the run with only the weights did not deviate: nothing was compared")
    if not largest <= allowed:  # so that NaN fails
        raise DemoError(f"the loss curves differ by {largest:.2g}; allowed is {allowed:.2g}")


def main() -> int:
    """Run all phases, then compare them, print a table and draw the curves."""
    # Ending the demo ends its processes: as an exception, the signal reaches the code that kills
    # them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    started_s = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    (OUTPUT / "logs").mkdir(parents=True)
    try:
        for phase in PHASES:
            run_phase(phase)
        comparison = Comparison.of(UNINTERRUPTED, ELASTIC, (ON_4, *WEIGHTS_ONLY))
        # Also printed if the check fails: then it helps to find the cause.
        shown = (*ELASTIC, *WEIGHTS_ONLY, *UNINTERRUPTED)
        print(f"\n{table(shown, comparison)}\n\n{summarize(comparison)}\n")
        draw(ELASTIC, comparison, OUTPUT / "loss.png")
        print(f"Picture: {OUTPUT / 'loss.png'}\nCurves:  tensorboard --logdir {OUTPUT}")
        check(comparison)
    except DemoError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print(f"All checks passed in {time.monotonic() - started_s:.0f} s.")
    print("To check your own machines: lightning-elastic-zero selftest --dir DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
