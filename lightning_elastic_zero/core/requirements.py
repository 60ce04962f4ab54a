"""The supported releases of DeepSpeed and Lightning.

``engine.deepspeed`` and ``trainer.lightning`` list the names that the library uses of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True, slots=True)
class Requirement:
    """The supported releases of a package, as in pyproject.toml."""

    title: str
    """The package's name in messages."""
    package: str
    """Name of the distribution."""
    wanted: str
    """A version specifier."""
    newest_tested: str
    """The newest tested release, as in constraints.txt."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Releases inside the range that are excluded, with the reason."""

    def __str__(self) -> str:
        return f"{self.package}{self.wanted}"

    def incompatibility(self, found: str) -> str | None:
        """Return why the installed release cannot be used, or None.

        An unknown release is not refused.
        """
        try:
            release = Version(found)
        except InvalidVersion:
            return None
        if SpecifierSet(self.wanted).contains(release, prereleases=True):
            return None
        here = Version(release.base_version)
        reason = next(
            (why for left_out, why in self.excluded.items() if Version(left_out) == here), ""
        )
        because = f" ({reason})" if reason else ""
        return f"{self.title} {found} is installed{because}: install {self}"

    def is_at_least(self, found: str, release: str) -> bool:
        """Whether an installed release is at least another one; False if it is unknown."""
        try:
            return Version(found) >= Version(release)
        except InvalidVersion:
            return False

    def missing_names_message(self, found: str, owner: str, missing: Iterable[str]) -> str | None:
        """Return a sentence about names that the installed release lacks, or None.

        ``owner`` describes the object that lacks them.
        """
        names = ", ".join(missing)
        if not names:
            return None
        return (
            f"{self.title} {found or '(of an unknown release)'} has no {names} in {owner}, which "
            f"this library reads: install {self}; {self.newest_tested} is the newest tested release"
        )


def own_version() -> str:
    """Return this library's version, also for a source tree that is not installed."""
    return version_of("lightning-elastic-zero") or "0.0.0+source"


@cache
def version_of(package: str) -> str:
    """Return an installed package's version; empty if it is not installed.

    Cached, because reading takes milliseconds and each save records four versions. The standard
    library parses the whole description of a package as mail, which takes ten times as long.
    """
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return ""
    line = re.search(r"^Version: *(.+)$", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1].strip() if line else found.version


def missing_names(owner: object, names: Iterable[str]) -> list[str]:
    """Return the names that an object does not have."""
    return [name for name in names if not hasattr(owner, name)]


_LOSES_GRADIENTS = (
    "with gradient accumulation, ZeRO-2 loses the gradients of all micro-batches but the last"
)
# Each micro-batch before the end of a window replaces `all_grad_tensors`, because only the end
# creates `averaged_gradients` (stage_1_and_2.py). ZeRO-1 gets there only at the end of the window.

DEEPSPEED = Requirement(
    title="DeepSpeed",
    package="deepspeed",
    wanted=">=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2,!=0.18.3",
    newest_tested="0.19.8",
    excluded={
        **dict.fromkeys(("0.17.6", "0.18.0", "0.18.1", "0.18.2"), _LOSES_GRADIENTS),
        "0.18.3": "it ignores scale_wrt_gas: with gradient accumulation over A micro-batches, "
        "each step would be 1/A of what it should be",
    },
)
"""0.16 is the oldest release that Lightning supports with torch 2.6."""

LIGHTNING = Requirement(
    title="Lightning",
    package="lightning",
    wanted=">=2.5,!=2.6.2,!=2.6.3",
    newest_tested="2.6.6",
    excluded={"2.6.2": "a compromised upload", "2.6.3": "a compromised upload"},
)
