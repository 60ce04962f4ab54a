"""Kill a ZeRO-3 run in mid-epoch, go on with other process counts, compare it with one unstopped.

    python examples/demo.py

A small GPT learns the source text of Python's standard library, on CPU: on 4 processes, which are
killed in the middle of an epoch; on 2, which are killed in the middle of another; on 3 to the end.
Then once more on 4 processes without a stop. And, from where the first 4 were killed, what people
do today: new runs on 2 and 3 processes that begin with the weights alone.

This takes a few minutes on two cores and leaves in ``demo_output/`` a picture of the loss curves,
TensorBoard's files, checkpoints and logs. The exit code is 0 only if the elastic run took the same
samples in each optimizer step as the uninterrupted one, and their two curves are the same up to the
order of floating-point sums.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time

from demo_phases import OUTPUT, STEPS_PER_EPOCH, DemoError, Phase, run_phase
from demo_report import Comparison, draw, summarize, table

EPOCHS = 4
KILLS = (30, 66)  # steps of the checkpoints that are gone on from: in epochs 2 and 3, of 24 steps
END = EPOCHS * STEPS_PER_EPOCH

ON_4 = Phase("elastic", processes=4, start_step=0, stop_step=KILLS[0], epochs=EPOCHS)
ELASTIC = (
    ON_4,
    Phase("elastic", processes=2, start_step=KILLS[0], stop_step=KILLS[1], epochs=EPOCHS),
    Phase("elastic", processes=3, start_step=KILLS[1], stop_step=END, epochs=EPOCHS),
)

# Who has nothing but the weights begins the interrupted epoch again, with a fresh optimizer, a new
# warm-up and a schedule for the epochs that are left: 3, and 2 when one and a half of them are
# done. That is half an epoch more in the end; the curve is drawn as far as the others go.
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

# In this order both ways to go on begin with the checkpoint as the kill left it: a run deletes its
# checkpoints but for the newest two.
PHASES = (ON_4, *WEIGHTS_ONLY, *ELASTIC[1:], *UNINTERRUPTED)
MIN_RATIO = 1000  # times; see check()


def check(comparison: Comparison) -> None:
    """See that each phase went on where its checkpoint was, and that two runs are the same.

    On another process count gradients are summed in another order, which changes their last bits:
    by how much depends on the processor. So the measure is taken here too: the run that goes on
    with its weights alone must be a thousand times as far away as the elastic one.

    Raises:
        DemoError: something does not hold.
    """
    for phase in PHASES:
        begun = phase.events()[0].step
        if begun != phase.start_step:
            raise DemoError(
                f"{phase.run} on {phase.processes} processes began at step {begun}, but the "
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
        raise DemoError("a run with the weights alone made no difference: nothing was compared")
    if not largest <= allowed:  # so that NaN fails
        raise DemoError(f"the loss curves differ by {largest:.2g}; allowed is {allowed:.2g}")


def main() -> int:
    """Run all phases, then compare, tell and draw."""
    # Whoever ends the demo ends its processes too: as an exception it passes where they are killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    started_s = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    (OUTPUT / "logs").mkdir(parents=True)
    try:
        for phase in PHASES:
            run_phase(phase)
        comparison = Comparison.of(UNINTERRUPTED, ELASTIC, (ON_4, *WEIGHTS_ONLY))
        # Shown also where the check fails: then it is what one wants to see.
        shown = (*ELASTIC, *WEIGHTS_ONLY, *UNINTERRUPTED)
        print(f"\n{table(shown, comparison)}\n\n{summarize(comparison)}\n")
        draw(ELASTIC, comparison, OUTPUT / "loss.png")
        print(f"Picture: {OUTPUT / 'loss.png'}\nCurves:  tensorboard --logdir {OUTPUT}")
        check(comparison)
    except DemoError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print(f"All held, in {time.monotonic() - started_s:.0f} s.")
    print("Does it hold on your machines? lightning-elastic-zero selftest --dir DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
