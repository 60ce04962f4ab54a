"""The command line's verbs: inspect, verify, compare and convert checkpoints of every kind.

They need no process group, GPU or model, and read through ``CheckpointReader``, as loads do.
"""
