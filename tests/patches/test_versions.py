"""Versions of other libraries: the declared ranges, the pinned versions, and what is warned about or refused."""

import re
import sys
import warnings

import pytest
import torch
from packaging.specifiers import SpecifierSet

from ds_cp.patches import versions
from harness.paths import ROOT


def test_the_declared_torch_has_addmm_with_out_dtype():
    # addmm with out_dtype: missing in torch 2.6 and 2.7; torch 2.8 and 2.9 refuse an out_dtype other than that of the factors
    declared = versions.ranges().get("torch", SpecifierSet())
    assert not any(version in declared for version in ("2.6.0", "2.7.1", "2.8.0", "2.9.1"))
    assert "2.10.0" in declared and torch.__version__ in declared
    assert "out_dtype" in str(torch.ops.aten.addmm.dtype._schema)


DECLARED = [
    "transformers<6,>=5.2", "deepspeed>=0.1", 'trl>=1.5; extra == "trl"', "nobody-has-this>=3",
    'transformers<5.9,>=5.2; extra == "tested"', 'trl<1.9,>=1.5; extra == "tested"',
]  # fmt: skip
VERSIONS = [  # (installed versions, warning, error)
    ({"transformers": "5.2.0", "trl": "1.8.7"}, "", ""),
    ({"transformers": "5.2.0.dev0", "trl": "1.5"}, "", r"transformers 5\.2\.0\.dev0 \(<6,>=5\.2\)"),
    ({"transformers": "5.9.1", "trl": "1.5"}, r"run with transformers 5\.9\.1 \(.*ds_cp verify", ""),
    ({"transformers": "6.0", "trl": "2.0"}, "", r"transformers 6\.0 "),
    ({"transformers": "5.3+local", "trl": "1.10"}, r"run with trl 1\.10 \(", ""),
    ({"transformers": "5.3", "trl": "1.4"}, "", r"trl 1\.4 "),
]


@pytest.mark.parametrize("installed, told, refused", VERSIONS)
def test_versions_outside_of_the_range_warn_or_are_refused(monkeypatch, installed, told, refused):
    from ds_cp import patches
    from ds_cp.config import ConfigError
    from ds_cp.patches import versions

    def check(rank):
        versions.ranges.cache_clear()
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            versions.check()
        return [str(each.message) for each in caught]

    with monkeypatch.context() as patched:
        patched.setattr(versions.metadata, "requires", lambda name: DECLARED)
        patched.setitem(sys.modules, "transformers", sys)  # only imported libraries are compared
        patched.setattr(versions, "installed_version", lambda name: installed.get(name, "0.2"))
        for name in ("trl", "nobody_has_this"):
            patched.setitem(sys.modules, name, sys) if name == "trl" else patched.delitem(sys.modules, name, False)
        if refused:
            with pytest.raises(ConfigError, match=refused):
                check("0")
            before = patches.installed()
            with pytest.raises(ConfigError, match=refused):
                patches.install()  # called when a key with size > 1 is read
            assert patches.installed() == before
        else:
            said = check("0")
            assert (len(said), said == [] or bool(re.search(told, said[0]))) == (bool(told), True)
            assert check("1") == []
    versions.ranges.cache_clear()


def test_the_pinned_versions_are_inside_of_what_is_declared():
    from ds_cp.patches import versions

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    tested = versions.ranges(versions.TESTED)
    assert set(tested) >= {"torch", "deepspeed", "transformers", "accelerate", "trl", "peft"}
    for declared in (tested, versions.ranges(), versions.ranges("trl"), versions.ranges("test")):
        for name, allowed in declared.items():
            assert pins[name] in allowed if name in pins else name in ("packaging", "setuptools"), (name, allowed)
