"""Which versions of other libraries ds_cp works with. setup.py declares them; the metadata of the installed ds_cp tells.

What pip insists on is refused where something else is installed all the same. What the extra ``tested`` lists has been run;
outside of it a run gets one line.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_cp.config import ConfigError

DISTRIBUTION, TESTED = "ds-cp", "tested"


@cache
def ranges(extra: str = "") -> dict[str, SpecifierSet]:
    """What is declared without an extra, or by one alone: ranges by distribution. Empty where ds_cp is not installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {
        each.name: each.specifier
        for each in requirements
        if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)
    }


def outside(declared: dict[str, SpecifierSet]) -> dict[str, str]:
    """What is installed, imported and outside of its range, by distribution: "5.12.0 (>=5.16)"."""
    found = {}
    for name, allowed in declared.items():
        if name.replace("-", "_") not in sys.modules:
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not allowed.contains(version, prereleases=True):
            found[name] = f"{version} ({allowed})"
    return found


def check() -> None:
    """Of what is imported by now: refuse versions that pip would refuse, and say of others that nobody has run ds_cp with them.

    Raises:
        ConfigError: names the library, its version and the range.
    """
    if wrong := outside(ranges("trl") | ranges("liger") | ranges()):
        raise ConfigError(
            f"installed is {_listed(wrong)}: outside of these ranges ds_cp does not work, or was seen to train wrong without saying "
            "so. Install a version inside of them, or take the key out. Nothing was started."
        )
    from ds_cp.patches import data_parallel

    if (unseen := outside(ranges(TESTED))) and data_parallel.rank() == 0:
        warnings.warn(
            f"ds_cp has not been run with {_listed(unseen)}. Its table of exact model types was made with another version and "
            'proves nothing of this one: compare your model with "ds_cp verify MODEL" before you train.',
            stacklevel=2,
        )


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in found.items())
