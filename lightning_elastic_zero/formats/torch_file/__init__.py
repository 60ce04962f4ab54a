"""Files of ``torch.save``, written and read by ranges of bytes.

What is written is a plain zip that everybody can ``torch.load(..., weights_only=True)``; what is
special is how. ``writing`` takes each tensor's bytes from where they live, a bounded part at a
time. ``index`` knows where in a file each tensor's bytes are without reading them; ``reading``
reads the ranges that are wanted, each byte verified, to where they are wanted; ``strides`` knows
where elements are that lie in another order. ``legacy`` reads what is no zip.
"""

from __future__ import annotations

from lightning_elastic_zero.formats.torch_file.legacy import LegacyFile, is_legacy
from lightning_elastic_zero.formats.torch_file.reading import (
    StoredRun,
    TorchFile,
    tensors_of,
    with_copies,
)
from lightning_elastic_zero.formats.torch_file.strides import is_dense
from lightning_elastic_zero.formats.torch_file.writing import (
    ChunkedSource,
    ElementSource,
    PiecewiseSource,
    TorchFileWriter,
)

__all__ = [
    "ChunkedSource",
    "ElementSource",
    "LegacyFile",
    "PiecewiseSource",
    "StoredRun",
    "TorchFile",
    "TorchFileWriter",
    "is_dense",
    "is_legacy",
    "tensors_of",
    "with_copies",
]
