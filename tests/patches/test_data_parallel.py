"""Views that count data-parallel groups instead of ranks, and the cached size of the key."""

from types import SimpleNamespace

import pytest

from ds_cp.config import ConfigError
from ds_cp.patches import data_parallel, deepspeed
from ds_cp.patches.transformers import trainer


def test_counts_of_ranks_become_counts_of_groups():
    whole = SimpleNamespace(world_size=8, process_index=5, per_device_train_batch_size=3)
    shown = trainer.arguments_view(whole, 4)
    assert (shown.world_size, shown.process_index, shown.per_device_train_batch_size) == (2, 1, 3)
    assert data_parallel.WorkerView(whole, 4, "world_size").process_index == 5


@pytest.mark.parametrize("world, value, size", [
    (8, {"size": 4}, 4), (8, {"size": "auto"}, 8), (4, {"size": "auto"}, 4), (8, {"size": 1}, 1), (1, {"size": "auto"}, 1),
])  # fmt: skip
def test_the_size_is_that_of_this_key_in_this_world(monkeypatch, world, value, size):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    ds_config = {"context_parallel": value}
    assert [data_parallel.cp_size_of_config(ds_config) for _ in range(2)] == [size, size]
    assert data_parallel.cp_size_of_config({}) == 1


@pytest.mark.parametrize("wrong", [True, 1.0, 3, "1"])
def test_a_wrong_size_raises_every_time_even_if_it_equals_a_cached_right_one(monkeypatch, wrong):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert data_parallel.cp_size_of_config({"context_parallel": {"size": 1}}) == 1
    for _ in range(2):
        with pytest.raises(ConfigError):
            data_parallel.cp_size_of_config({"context_parallel": {"size": wrong}})


def test_data_parallel_rank_and_size_before_the_process_group_exists(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    view = deepspeed.DataParallelMpu(2)
    assert (view.get_data_parallel_world_size(), view.get_data_parallel_rank()) == (4, 2)
