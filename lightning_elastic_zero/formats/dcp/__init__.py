"""Directories of ``torch.distributed.checkpoint``: of FSDP, ModelParallel, and plain torch.

torch's own library reads the data; no process group is needed for that. All but ``detection``
import it, which takes a second: they are imported when there is such a directory.
"""
