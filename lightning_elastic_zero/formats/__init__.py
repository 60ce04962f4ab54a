"""Readers and writers of checkpoint formats; ``open_checkpoint`` selects one by content."""
