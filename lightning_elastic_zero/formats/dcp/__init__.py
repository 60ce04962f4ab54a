"""Directories of ``torch.distributed.checkpoint``: of FSDP, ModelParallel, and plain torch.

torch's own library reads the data; no process group is needed for that. ``metadata`` reads what
the directory says of itself, without running code of anyone's; ``tree`` finds the model and the
optimizer in it; ``chunks`` reads runs of elements from the saved chunks; ``directory`` is the
reader. Importing this package takes a second, so it is imported when there is such a directory.
"""

from __future__ import annotations

from lightning_elastic_zero.formats.dcp.reader import DcpReader

__all__ = ["DcpReader"]
