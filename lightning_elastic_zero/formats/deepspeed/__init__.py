"""What DeepSpeed writes: stock ZeRO directories, elastic ones, Universal Checkpoints."""
