"""The JSON key: accepted values, and the messages for refused ones."""

import base64
import json
import re

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.runtime.config import DeepSpeedConfig

import ds_cp
from data.cases.config import UNREAD, WRONG
from ds_cp import patches
from ds_cp.config import ConfigError, ContextParallelConfig, normalise, raw_value, read, unread_key
from ds_cp.patches.deepspeed import refuse_features
from harness.paths import ROOT


@pytest.fixture
def watched():
    """Activate ds_cp for the two classes that read a DeepSpeed config."""
    for name in ("deepspeed.runtime.config", "accelerate.utils.deepspeed"):
        patches.on_import(name)


@pytest.mark.parametrize("value, message", WRONG, ids=[json.dumps(value) for value, _ in WRONG])
def test_a_wrong_key_says_what_is_wrong_and_what_is_allowed(value, message):
    with pytest.raises(ConfigError, match=message) as raised:
        normalise({"context_parallel": value}, world_size=8)
    assert str(raised.value).endswith("Nothing was started.")


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError, match="size.*\n.*method.*\n.*Nothing"):
        read({"size": -1, "method": "bogus"})


def test_a_job_of_one_rank_is_told_how_to_start_more():
    with pytest.raises(ConfigError, match="--num_accelerators"):
        normalise({"context_parallel": {"size": 2}}, world_size=1)


def test_auto_size_becomes_the_world_size_and_no_auto_is_left_for_other_readers():
    ds_config = {"context_parallel": {"size": "auto", "method": "auto"}, "train_batch_size": 4}
    assert normalise(ds_config, 8).size == 8
    assert ds_config["context_parallel"]["size"] == 8
    assert "auto" not in json.dumps(ds_config)
    again = json.loads(json.dumps(ds_config))
    normalise(again, 8)
    assert again == ds_config


def test_without_the_key_nothing_changes():
    ds_config = {"train_batch_size": 4}
    assert normalise(ds_config, 8) is None
    assert ds_config == {"train_batch_size": 4}


def test_the_key_is_found_in_every_form_that_deepspeed_reads(tmp_path):
    ds_config = {"context_parallel": {"size": 2}}
    text = json.dumps(ds_config)
    path = tmp_path / "ds.json"
    path.write_text("# hjson allows comments\n" + text)
    for form in (ds_config, text, base64.urlsafe_b64encode(text.encode()).decode(), str(path), path):
        assert raw_value(form) == {"size": 2}
    for form in (None, 3, "no/such/file.json", {}, base64.urlsafe_b64encode(b"nothing").decode()):
        assert raw_value(form) is None


@pytest.mark.parametrize("text, name", UNREAD.items(), ids=UNREAD.values())
def test_a_misspelled_or_nested_key_is_refused_wherever_a_config_is_read(text, name, watched, tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text(text)
    message = f'"{re.escape(name)}" in the DeepSpeed config is read by nobody, so no sequence would be shared'
    for reader, config in (
        (DeepSpeedConfig, str(path)),
        (DeepSpeedConfig, json.loads(text)),
        (HfDeepSpeedConfig, str(path)),
        (ds_cp.dp_size, str(path)),
    ):
        with pytest.raises(ConfigError, match=message):
            reader(config)
    monkeypatch.setenv("DS_CP_DISABLE", "1")
    with pytest.warns(UserWarning, match="NO sequence is shared"):
        HfDeepSpeedConfig(str(path))


def test_names_of_deepspeed_and_values_are_not_mistaken_for_the_key():
    names = (
        "tensor_parallel",
        "expert_parallel",
        "sequence_parallel_size",
        "data_parallel_size",
        "pipeline_parallelism",
    )
    assert (
        unread_key({**{name: {"autotp_size": 1} for name in names}, "context_parallel": {"size": 2}, 3: None}) is None
    )
    assert unread_key({"wandb": {"project": "context_parallel"}, "steps": [{"context_parallel": 2}]}) is None


EXAMPLES = sorted((ROOT / "example_configs").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_an_example_config_is_accepted(path):
    ds_config = json.loads(path.read_text())
    asked = dict(ds_config["context_parallel"])
    assert normalise(ds_config, asked["size"]).size > 1
    assert ds_config["context_parallel"].items() >= asked.items()
    refuse_features(ds_config)


def test_the_readme_lists_each_example_and_each_name_of_the_key_with_its_default():
    readme = (ROOT / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+\.json)` \|", readme, re.MULTILINE)) == [path.name for path in EXAMPLES]
    told = dict(
        re.findall(
            r"^\| `(\w+)` \| (?:seconds, )?`?([^`,|]+?)`?(?:,[^|]*)? \|", _section(readme, "### The key"), re.MULTILINE
        )
    )
    assert {name: json.loads(text) for name, text in told.items()} == ContextParallelConfig().model_dump()


def _section(text, title):
    return text.split(f"\n{title}\n")[1].split("\n### ")[0]
