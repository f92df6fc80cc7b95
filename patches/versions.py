"""Which versions of other libraries ds_cp works with: declared in pyproject.toml, read from the installed metadata.

A version outside of the dependencies' ranges, which pip would not have installed, is refused. The extra ``tested`` lists
the versions that the tests have been run with; any other version gets one warning.
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
    """Version ranges by distribution: those of the dependencies, or those of one extra alone.

    Empty where ds_cp is not installed as a distribution.
    """
    try:
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {
        requirement.name: requirement.specifier
        for requirement in requirements
        if (requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra)
    }


@cache
def installed_version(name: str) -> str:
    """Version of an installed distribution. Cached, since each call would parse the metadata file of the distribution."""
    return metadata.version(name)


def outside(declared: dict[str, SpecifierSet]) -> dict[str, str]:
    """Imported libraries whose installed version is outside of its range: distribution to "5.12.0 (>=5.16)"."""
    mismatches = {}
    for name, allowed in declared.items():
        if name.replace("-", "_") not in sys.modules:
            continue
        try:
            version = installed_version(name)
        except metadata.PackageNotFoundError:
            continue
        if not allowed.contains(version, prereleases=True):
            mismatches[name] = f"{version} ({allowed})"
    return mismatches


def check() -> None:
    """Refuse imported libraries outside of the dependencies' ranges, and warn of versions that were never tested.

    Raises:
        ConfigError: Names the library, its version and the range.
    """
    if wrong := outside(ranges("trl") | ranges("liger") | ranges()):
        raise ConfigError(
            f"installed is {_listed(wrong)}: outside of these ranges ds_cp does not work, or was seen to train wrong without saying "
            "so. Install a version inside of them, or take the key out. Nothing was started."
        )
    from ds_cp.patches import data_parallel

    if (untested := outside(ranges(TESTED))) and data_parallel.rank() == 0:
        warnings.warn(
            f"ds_cp has not been run with {_listed(untested)}. Its table of exact model types was made with another version and "
            'proves nothing of this one: compare your model with "ds_cp verify MODEL" before you train.',
            stacklevel=2,
        )


def _listed(mismatches: dict[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in mismatches.items())
