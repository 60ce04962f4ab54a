"""What a rank does to see that each name of DeepSpeed's is missed, on a real engine."""

from __future__ import annotations

from lightning_elastic_zero.engine import releases
from lightning_elastic_zero.engine.support import optimizer_wrapper
from tests.engine._setup import Setup, engine_of


def refusals(setup: Setup) -> tuple[list[str], dict[str, str]]:
    """Ask an engine for its names, then for each under a name that no release has.

    Returns:
        What is missed as it is, and, by owner and name, what is missed where that one alone is
        gone.
    """
    found: dict[str, str] = {}
    with engine_of(setup, 0) as engine:
        wrapper = optimizer_wrapper(engine)
        missed = [*releases.check_names(engine, wrapper, "9.9")]
        for owner, _, names in [*releases._owners(engine, wrapper, "9.9")]:
            assert isinstance(names, dict)
            for name, purpose in [*names.items()]:
                gone = f"{name}_gone"
                del names[name]
                names[gone] = purpose
                try:
                    said = "\n".join(releases.check_names(engine, wrapper, "9.9"))
                finally:
                    del names[gone]
                    names[name] = purpose
                told = f"{gone} (to {purpose})" in said and f" in {owner}, which" in said
                found[f"{owner}: {name}"] = "" if told else said or "not missed"
    return missed, found
