"""Lightning's trainer, made to go on as if nothing had happened: data, counters, randomness.

``batches`` settles how a global batch is cut; ``loaders`` puts samplers into training loaders that
take up an epoch anywhere, and ``placing`` lets them begin there; ``moments`` keeps what belongs to
the last optimizer step; ``running`` keeps what an epoch has summed up (``epoch_values`` Lightning's
results, ``metric_states`` the module's metrics); ``reports`` says what changed since the save;
``guessing`` how far another program's run is; ``live`` is all that is
written to Lightning's live loops, ``answers`` what is answered in ``ModelCheckpoint``'s place;
``resume`` is the story that a strategy follows; ``steady`` is that strategy.
"""

from __future__ import annotations

from lightning_elastic_zero.continuation.loaders import ResumesAtSample
from lightning_elastic_zero.continuation.placing import LostData
from lightning_elastic_zero.continuation.resume import STATE_KEY
from lightning_elastic_zero.continuation.steady import SteadyDeepSpeedStrategy

__all__ = ["STATE_KEY", "LostData", "ResumesAtSample", "SteadyDeepSpeedStrategy"]
