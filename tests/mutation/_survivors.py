"""Mutants that no test can or need notice, each with the reason."""

from __future__ import annotations

_NO_OTHER_LENGTH = "equivalent: both were made from one list, or their lengths were compared before"
_A_STEP_MORE = "equivalent: one parameter or rank more is looked at, which has nothing there"
_ANY_BOUND = "a bound on a search, which could as well be its neighbour"
_ON_A_DEVICE = "a device has a stream of its own: the test of it is marked gpu"

SURVIVORS = {
    "layout.py: for (fragment, runs), transfer in zip(unfinished, transfers, strict=True)"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: ends = accumulate(n + pad for n, pad in zip(self.numels, pads, strict=True))"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: "
    "for index, (buffer, starts) in enumerate(zip(buffers, self._starts, strict=True)):"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: for name, start, numel in zip(buffer.names, starts, buffer.numels, strict=True):"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: for buffer, starts in zip(self._buffers, self._starts, strict=True):"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: for name, numel in zip(buffer.names, buffer.numels, strict=True):"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: "
    "names, numels = zip(*shapes, strict=True) if (shapes := list(shapes)) else ((), ())"
    "  ->  False": _NO_OTHER_LENGTH,
    "manifest.py: for name, numel in zip(buffer.names, buffer.numels, strict=True)"
    "  ->  False": _NO_OTHER_LENGTH,
    "partition.py: first, last = ((place.first + at) // place.part for at in (start, stop - 1))"
    "  ->  stop + 1": _A_STEP_MORE,
    "partition.py: yield from self._held(name, range(first, last + 1), start, stop)"
    "  ->  2": _A_STEP_MORE,
    "partition.py: entered = max(bisect_right(starts, first) - 1, 0)  ->  2": _A_STEP_MORE,
    "partition.py: return ContiguousPartition(whole, world_size=1)  ->  2": _A_STEP_MORE,
    "partition.py: entered = max(bisect_right(starts, first) - 1, 0)  ->  min": (
        "begins at the first parameter: more steps, the same fragments"
    ),
    "partition.py: return PerParameterPartition([FlatBuffer(0, tuple(names), tuple(numels))], "
    "world_size)  ->  1": "frozen weights have no group: the number is read nowhere",
    "manifest.py: if wrong := [p.name for p in manifest.parameters if min(p.shape, default=0) < 0]:"
    "  ->  1": "equivalent: the size of no dimension is only compared with zero",
    "data_progress/batch_plan.py: "
    "if plan is None and allow_uneven and global_batch_size >= world_size:"
    "  ->  global_batch_size > world_size": (
        "equivalent: one sample for each rank is an even plan, found before"
    ),
    "data_progress/batch_plan.py: for count in range(1, global_batch_size + 1)  ->  2": (
        "equivalent: on one device more than there are samples there is no plan"
    ),
    "data_progress/rng.py: "
    'if device is not None and device.type != "cpu" and device.type in state:'
    '  ->  device.type == "cpu"': _ON_A_DEVICE,
    "data_progress/rng.py: "
    'if device is not None and device.type != "cpu" and device.type in state:'
    "  ->  device.type not in state": _ON_A_DEVICE,
    "data_progress/rng.py: "
    "torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)"
    "  ->  pass": _ON_A_DEVICE,
    "data_progress/rng.py: torch.manual_seed(number)  # devices too  ->  pass": _ON_A_DEVICE,
    "engine/restore.py: "
    "for group, saved in zip(inner.param_groups, values.hyperparameters, strict=True):"
    "  ->  False": _NO_OTHER_LENGTH,
    "checkpoint/transfers.py: "
    "return [{**w, **s} for w, s in zip(weights, targets.states, strict=True)] + weights"
    "  ->  False": _NO_OTHER_LENGTH,
    'engine/restore.py: on_host = has_place or master.device.type == "cpu"'
    '  ->  ((has_place) and (master.device.type == "cpu"))': (
        "on a CPU the host and the device are one"
    ),
    "engine/restore.py: if stepped.is_contiguous():  ->  not (stepped.is_contiguous())": (
        "the same elements, in a state of other strides than its weight's"
    ),
    "checkpoint/transfers.py: at = next(iter(layout.covering(name, 0, 1)))  ->  2": (
        "equivalent: only the first run is taken, which holds element 0"
    ),
    "data_progress/sample_order.py: _DEPTH = 4  ->  5": _ANY_BOUND,
    "data_progress/sample_order.py: reduced = item.__reduce_ex__(4)  ->  5": (
        "equivalent for the objects that name samples: a digest is compared within one release"
    ),
    "data_progress/sample_order.py: "
    "yield from ((str(i), v) for i, v in enumerate(holder[:64]) if not isinstance(v, int))"
    "  ->  65": _ANY_BOUND,
    "data_progress/sample_order.py: generator.seed(number % (1 << 32))"
    "  ->  number // (1 << 32)": "other 32 bits of a mixed number are as good",
}
"""By file and change, as ``python -m tests.mutation`` prints them."""
