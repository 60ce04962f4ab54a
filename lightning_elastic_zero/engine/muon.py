"""Muon's momentum under ZeRO-3, which DeepSpeed brings forward itself."""

from __future__ import annotations

from typing import Any

MOMENTUM_KEY = "momentum_buffer"


def restore_muon_momentum(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Continue with the momentum that the wrapped optimizer's state has now.

    With ``save_muon_momentum_buffer_in_memory`` it reads buffers of its own, to which that state is
    a link; without, it reads the state, in the type in which it communicates.
    """
    if not getattr(optimizer, "use_muon", False):
        return
    own = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
    for sub_group, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        restored = optimizer.optimizer.state.get(flat, {}).get(MOMENTUM_KEY)
        if sub_group in own:
            buffer = own[sub_group]
            # A fresh optimizer begins without momentum.
            buffer.zero_() if restored is None else buffer.copy_(restored)
            optimizer.optimizer.state[flat][MOMENTUM_KEY] = buffer
        elif restored is not None:
            momentum = restored.to(optimizer.communication_data_type)
            optimizer.optimizer.state[flat][MOMENTUM_KEY] = momentum
