"""The releases of DeepSpeed and Lightning that this library works with; pure.

The names that it relies upon in them are listed beside their use: ``engine.releases`` and
``trainer.lightning_internals``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True, slots=True)
class Requirement:
    """The releases of a package that this library works with, as pyproject.toml has them."""

    title: str
    """What its users call the package."""
    package: str
    """The distribution, as pip knows it."""
    wanted: str
    """A version specifier."""
    newest_tested: str
    """The newest release that the tests were run with: that of constraints.txt."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Why a release inside the range is left out."""

    def __str__(self) -> str:
        return f"{self.package}{self.wanted}"

    def incompatibility(self, found: str) -> str | None:
        """Return why the installed release cannot be used; None where it can.

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
        """Whether an installed release is another one, or newer; False if it is not known."""
        try:
            return Version(found) >= Version(release)
        except InvalidVersion:
            return False

    def missing_names_message(self, found: str, owner: str, missing: Iterable[str]) -> str | None:
        """Return which names the installed release has no more; None where none is missing.

        ``owner`` describes the object that lacks them.
        """
        names = ", ".join(missing)
        if not names:
            return None
        return (
            f"{self.title} {found or '(of an unknown release)'} has no {names} in {owner}, which "
            f"this library reads: install {self}; {self.newest_tested} is the newest that it was "
            "tested with"
        )


def own_version() -> str:
    """Return the installed distribution's version, or one that marks a bare source tree."""
    return version_of("lightning-elastic-zero") or "0.0.0+source"


@cache
def version_of(package: str) -> str:
    """Return an installed package's version, empty where it is not installed.

    Read once: parsing a package's metadata takes milliseconds, and every save records four.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def missing_names(owner: object, names: Iterable[str]) -> list[str]:
    """Return the names that an object does not have."""
    return [name for name in names if not hasattr(owner, name)]


_LOSES_GRADIENTS = (
    "with gradient accumulation, ZeRO-2 loses the gradients of all micro-batches but the last"
)
# In its stage_1_and_2.py, each micro-batch before a window's end replaces `all_grad_tensors`: it
# asks whether there are `averaged_gradients`, which only the window's end makes. ZeRO-1 comes
# there at the window's end alone.

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
"""0.16 is the oldest that Lightning takes together with torch 2.6."""

LIGHTNING = Requirement(
    title="Lightning",
    package="lightning",
    wanted=">=2.5,!=2.6.2,!=2.6.3",
    newest_tested="2.6.6",
    excluded={"2.6.2": "a compromised upload", "2.6.3": "a compromised upload"},
)
