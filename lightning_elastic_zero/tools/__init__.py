"""Look into checkpoints of every kind, prove them, compare them and take them elsewhere.

One module for each verb of the command ``lightning-elastic-zero``. No process group, no GPU, no
model: what a checkpoint says of itself has to do. Each reads by ``CheckpointReader``, so that what
can be loaded can be looked at.
"""
