"""Each wait, event and choice of a stream in snapshots, broken once: which test notices it.

What is written is ``file``'s text as it stands, once in it. ``python -m tests.mutation.waits``
breaks them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

_COPY_ENGINE = ("tests/core/test_copy_engine.py",)
_SURVIVES = "tests/engine/test_matrix.py::test_state_survives"
_BEHIND_ENGINE = (f"{_SURVIVES}[zeroBx2-bf16-bucket_500-zero3x1-bf16-sub_group_700]",)
_MUON = "tests/trainer/test_muon.py::test_muon_tears_no_snapshot"
_STREAMS = "checkpoint/device_streams.py"
_SNAPSHOT = "checkpoint/snapshot.py"
_UNCOPIED = "checkpoint/uncopied_tensors.py"
_ASYNC = "checkpoint/async_save.py"


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, and how it is broken."""

    name: str
    file: str
    """Below the package."""
    written: str
    broken: str
    tests: tuple[str, ...] = _COPY_ENGINE


WAITS = (
    # -- streams and events
    Wait(
        "a side stream does not wait for training's",
        _STREAMS,
        "    stream.wait_stream(torch.accelerator.current_stream(device))\n",
        "",
    ),
    Wait(
        "work is not given to the stream",
        _STREAMS,
        "    torch.accelerator.set_stream(stream)\n",
        "",
    ),
    Wait(
        "training stays on the side stream",
        _STREAMS,
        "        torch.accelerator.set_stream(displaced)\n",
        "        pass\n",
    ),
    Wait(
        "training stays on the other device",
        _STREAMS,
        "            torch.accelerator.set_stream(before)\n",
        "            pass\n",
    ),
    Wait("an event is not recorded", _STREAMS, "    event.record()\n", ""),
    Wait(
        "an event is of training's stream",
        _SNAPSHOT,
        "        return record_event(device)\n",
        "    return record_event(device)\n",
    ),
    Wait(
        "a waiting thread uses a processor",
        _STREAMS,
        "torch.Event(device, blocking=True)",
        "torch.Event(device, blocking=False)",
    ),
    Wait(
        "a new thread stays on device 0",
        _STREAMS,
        "        torch.accelerator.set_stream(torch.accelerator.current_stream(device))\n",
        "        pass\n",
    ),
    # -- the snapshot
    Wait(
        "copies are made on training's stream",
        _SNAPSHOT,
        "    with torch.no_grad(), on_stream(stream):\n",
        "    with torch.no_grad():\n",
    ),
    Wait(
        "memory is not kept for a copy",
        _SNAPSHOT,
        "                source.record_stream(stream)\n",
        "",
    ),
    Wait(
        "weights that forward changes are copied behind it",
        _SNAPSHOT,
        "[flat.master for flat in state.flats if flat.in_module]\n"
        "        # In the order in which they are written.\n"
        "        later = [flat.master for flat in state.flats if not flat.in_module]\n",
        "[]\n        later = [flat.master for flat in state.flats]\n",
    ),
    Wait(
        "buffers are not copied at once",
        _SNAPSHOT,
        't.detach().to("cpu", copy=True)',
        't.detach().to("cpu")',
    ),
    Wait(
        "steps are not copied at once",
        _SNAPSHOT,
        "value.detach().clone() if isinstance",
        "value.detach() if isinstance",
    ),
    Wait(
        "small copies have no event",
        _SNAPSHOT,
        "_copy_on_side_streams(on_device, _devices_of_small_copies(contents.state))",
        "_copy_on_side_streams(on_device, set())",
    ),
    Wait(
        "nobody waits for copies of a device",
        _SNAPSHOT,
        "            event.synchronize()\n",
        "            pass\n",
    ),
    Wait(
        "only the first device's copies are waited for",
        _SNAPSHOT,
        "        for event in self._on_device:\n",
        "        for event in self._on_device[:1]:\n",
    ),
    Wait("nobody waits for copies of the host", _SNAPSHOT, "        self._on_host.result()\n", ""),
    Wait(
        "the writer does not wait for copies",
        _SNAPSHOT,
        "            self.wait_for_copies()\n            yield\n",
        "            yield\n",
    ),
    Wait(
        "the step does not wait for copies",
        _SNAPSHOT,
        "        self.wait_for_copies()\n        self.live.wait(cancelled)\n",
        "        self.live.wait(cancelled)\n",
    ),
    Wait(
        "the step does not wait for what is not copied",
        _SNAPSHOT,
        "        self.live.wait(cancelled)\n",
        "",
    ),
    Wait(
        "the next snapshot does not wait for the last one's copies",
        _SNAPSHOT,
        "            last.wait_for_copies()\n",
        "            pass\n",
    ),
    Wait(
        "the next snapshot does not ask for the last one",
        _SNAPSHOT,
        "        self._forget_last()\n        plan =",
        "        plan =",
    ),
    Wait(
        "memory is released before the copies are made",
        _SNAPSHOT,
        "        self._forget_last()\n        self._thread",
        "        self._thread",
    ),
    # -- what is not copied
    Wait(
        "the writer reads on a stream that waits for nothing",
        _UNCOPIED,
        "                    streams.enter_context(on_stream(stream))\n",
        "                    pass\n",
    ),
    Wait(
        "nobody waits until all has been read",
        _UNCOPIED,
        "        while not (self._over.wait(_GLANCE_S) or cancelled()):\n",
        "        while False:\n",
    ),
    Wait(
        "what is read is counted before it is written",
        _UNCOPIED,
        "            yield chunk\n",
        "            self._unread = 0\n            self._look()\n            yield chunk\n",
    ),
    # -- the save in the background
    Wait(
        "the step's hook waits for nothing",
        _ASYNC,
        "            job.snapshot.wait(self._ranks.has_failed)\n",
        "",
    ),
    Wait(
        "the next save does not wait for the last one",
        _ASYNC,
        "            self._wait(ranks.report_progress)\n            self._job = None  #",
        "            self._job = None  #",
    ),
    Wait(
        "the writer does not say that it reads",
        _ASYNC,
        "            with self.snapshot.reading():\n",
        "            if True:\n",
    ),
    Wait(
        "the writer does not use training's device",
        _ASYNC,
        "            use_device(self._device)\n",
        "",
    ),
    # -- who calls it
    Wait(
        "no step waits",
        "checkpoint/manager.py",
        "self._unhook = engine.add_step_pre_hook(self._writer.wait_for_copies)",
        "pass",
        _BEHIND_ENGINE,
    ),
    Wait(
        "the second optimizer of partial offload does not wait",
        "engine/step_hook.py",
        '*filter(None, [getattr(engine.optimizer, "backup_optimizer", None)])',
        "",
        ("tests/engine/test_offload.py::test_a_save_behind_training_is_told_before_either_steps",),
    ),
    Wait(
        "Muon's momentum is copied while DeepSpeed changes it",
        "checkpoint/manager.py",
        "        if engine.updates_state_before_step():\n",
        "        if False:\n",
        (f"{_MUON}[None-2-Muon before the step]", f"{_MUON}[0-3-Muon after a batch]"),
    ),
    # -- the load, which has no waits: its copies to a device are the device's own order's
    Wait(
        "a load does not wait until its buffer has been read",
        "formats/torch_file/reading.py",
        "        else:\n            slot.copy_(elements)\n",
        "        else:\n            slot.copy_(elements, non_blocking=True)\n",
    ),
    Wait(
        "a load writes to a device's memory",
        "formats/torch_file/reading.py",
        'there = slot.device.type == "cpu" and',
        "there =",
    ),
)
