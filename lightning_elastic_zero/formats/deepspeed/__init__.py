"""Formats that DeepSpeed writes: stock ZeRO directories, elastic ones, Universal Checkpoints."""
