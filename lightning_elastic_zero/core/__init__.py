"""Pure logic: intervals, ZeRO's arithmetic, the manifest, names, compatibility, tensors."""
