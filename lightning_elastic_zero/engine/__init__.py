"""The live DeepSpeed engine as fragments and buffers; the only user of DeepSpeed."""
