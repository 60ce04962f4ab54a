"""Agreement between ranks: a step that fails on one rank fails on all ranks."""
