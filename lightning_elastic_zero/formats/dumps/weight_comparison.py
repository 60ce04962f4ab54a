"""The tensors behind the search: masters in the dumps, weights in the model file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import xxhash

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.deepspeed.zero_shard import shard_metadata
from lightning_elastic_zero.formats.dumps.table import ParameterRow, find_tensor, state_dict_in
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import COMPARED_ELEMENTS, same_rounded
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, spans
from lightning_elastic_zero.text import format_names

HEAD_ELEMENTS = 64
"""Compared first: few parameters begin alike."""


class ModelTable:
    """What a module says of the parameters, without their values."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Read names and shapes of a module of the architecture that was trained."""
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self.rows = {
            first: ParameterRow(first, tuple(parameter.shape), tuple(aliases))
            for parameter, (first, *aliases) in names.items()
        }
        """Every parameter, by the first of its names, in the module's order."""
        self.trained = [first for p, (first, *_) in names.items() if p.requires_grad and p.numel()]
        """The parameters that an optimizer is given as a rule."""
        kept = model.state_dict().keys()
        self.buffers = [n for n, _ in model.named_buffers(remove_duplicate=False) if n in kept]

    def check_compatible(self, weights: Mapping[str, object], where: str) -> None:
        """Compare with a model file.

        Raises:
            CheckpointMismatchError: it is of another architecture; with all differences.
        """
        known = {n for row in self.rows.values() for n in (row.name, *row.aliases)}
        found = {n: t for n, t in weights.items() if isinstance(t, torch.Tensor)}
        missing = [n for n, row in self.rows.items() if not found.keys() & {n, *row.aliases}]
        unknown = [n for n in found if n not in known and n not in self.buffers]
        reshaped = [
            f"{n} (saved {tuple(tensor.shape)}, here {row.shape})"
            for n, row in self.rows.items()
            if (tensor := found.get(n)) is not None and tuple(tensor.shape) != row.shape
        ]
        lines = [
            f"\n  - {what}: {format_names(names, 20)}"
            for what, names in (
                ("parameters missing from the file", missing),
                ("in the file, but not in the model", unknown),
                ("of other shapes", reshaped),
            )
            if names
        ]
        if lines:
            msg = f"{where} is not of this model:{''.join(lines)}"
            raise CheckpointMismatchError(msg)


class WeightComparison:
    """Compares masters, rounded, with a model file's weights, a bounded part at a time."""

    def __init__(
        self,
        files: ForeignFiles,
        dumps: Sequence[str],
        model_file: str,
        rows: Mapping[str, ParameterRow],
    ) -> None:
        """Keep what is compared.

        Args:
            files: with the dumps and the model file.
            dumps: the names of the dumps, by rank.
            model_file: the name of the file with the weights.
            rows: the parameters, by name.
        """
        self._files = files
        self._dumps = dumps
        self._model_file = model_file
        self._rows = rows
        self._flats: dict[str, tuple[object, Sequence[torch.Tensor]]] = {}
        self._heads: dict[str, torch.Tensor] = {}
        self._last_head: tuple[object, torch.Tensor] = (None, torch.empty(0))

    def __call__(self, name: str, fragments: Sequence[Fragment]) -> bool:
        """Whether what lies in the fragments is a parameter's weights, all of them."""
        return all(self._head_fits(name, f) for f in fragments[:1]) and all(
            same_rounded(self._masters(f, start, stop), self._low(name, start, stop))
            for f in fragments
            for start, stop in spans(f.start, f.stop, COMPARED_ELEMENTS)
        )

    def weights_digest(self, name: str) -> Hashable:
        """Return what is the same for parameters of the same weights."""
        digest, dtype = xxhash.xxh3_128(), None
        numel = self._rows[name].numel
        for start, stop in spans(0, numel, COMPARED_ELEMENTS):
            low = self._low(name, start, stop)
            # Zeros are alike, whatever their sign, and so are all NaN: see same_rounded.
            plain = torch.nan_to_num(low, nan=0.5) + 0
            digest.update(plain.view(torch.uint8).numpy().tobytes())
            dtype = low.dtype
        return str(dtype), numel, digest.hexdigest()

    def _head_fits(self, name: str, at: Fragment) -> bool:
        """Compare the first few elements: those of the weights are kept, as is the last place."""
        stop = min(at.stop, at.start + HEAD_ELEMENTS)
        if at.start or self._missing(at):
            return not self._missing(at)
        if name not in self._heads:
            self._heads[name] = self._low(name, 0, min(HEAD_ELEMENTS, self._rows[name].numel))
        place = (at.rank, at.buffer, at.offset, stop)
        if self._last_head[0] != place:
            self._last_head = place, self._masters(at, 0, stop)
        return same_rounded(self._last_head[1], self._heads[name][:stop])

    def _missing(self, at: Fragment) -> bool:
        """Whether a dump is too short to hold a fragment."""
        return at.offset + at.stop - at.start > self._flat(at).numel()

    def _flat(self, at: Fragment) -> torch.Tensor:
        dump = self._dumps[at.rank]
        tree = self._files.tree(dump)
        # Tensors of a file that was closed and opened again are others.
        if dump not in self._flats or self._flats[dump][0] is not tree:
            self._flats[dump] = tree, shard_metadata(tree, dump).flats
        return self._flats[dump][1][at.buffer]

    def _masters(self, at: Fragment, start: int, stop: int) -> torch.Tensor:
        flat = self._flat(at)
        first = at.offset + start - at.start
        found = torch.empty(stop - start, dtype=flat.dtype)
        run = StoredRun(flat, first, first + stop - start)
        self._files.get(self._dumps[at.rank]).read_into([(found, run)])
        return found

    def _low(self, name: str, start: int, stop: int) -> torch.Tensor:
        row = self._rows[name]
        where = str(self._files.folder / self._model_file)
        weights = state_dict_in(self._files.tree(self._model_file), where)
        tensor = find_tensor((name, *row.aliases), weights, where)
        found = torch.empty(stop - start, dtype=tensor.dtype)
        run = StoredRun(tensor.view(-1), start, stop)
        self._files.get(self._model_file).read_into([(found, run)])
        return found
