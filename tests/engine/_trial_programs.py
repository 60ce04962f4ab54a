"""Small engines whose ranks disagree: programs for ranks."""

from __future__ import annotations

from torch import distributed


def digests_with_a_changed_weight(stage: int) -> str:
    """Change a weight, but not its master, on rank 1; return what reading the state raises."""
    from lightning_elastic_zero.engine.selftest_engine import TrialModel, train, trial_engine
    from lightning_elastic_zero.errors import ElasticZeroError
    from lightning_elastic_zero.selftest import rank_tasks

    with trial_engine(TrialModel(1), stage) as engine:
        train(engine, 0, 1)
        assert rank_tasks._digests(engine)
        if distributed.get_rank() == 1:
            engine.module.embedding.weight.data[0, 0] += 1
        try:
            rank_tasks._digests(engine)
        except ElasticZeroError as error:
            return str(error)
    return ""
