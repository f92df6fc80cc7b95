"""Refused DeepSpeed features, and batch sizes that count groups."""

import os

import pytest
import torch

from harness import engine, models
from harness.models import ModelSpec

CP2 = {"size": 2, "method": "ring", "timeout": 5}
LLAMA = ModelSpec("llama")


FEATURES = {
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "expert_parallel": {"expert_parallel": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "zero_optimization.mics_shard_size": {"zero_optimization": {"mics_shard_size": 1}},
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"zero_quantized_weights": True}},
    "zero_optimization.zero_quantized_gradients": {"zero_optimization": {"zero_quantized_gradients": True}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
    "curriculum_learning": {"curriculum_learning": {"enabled": True}},
    "data_efficiency": {"data_efficiency": {"enabled": True}},
    "elasticity": {"elasticity": {"enabled": True}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "gradient_allreduce_op": {"gradient_allreduce_op": "sum"},
    "zero_optimization.zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
    "amp": {"amp": {"enabled": True}},
}


def test_every_refused_feature_is_tested():
    from ds_cp.patches.deepspeed import FEATURES as refused

    assert {name for name, *_ in refused} == set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_would_train_wrong_is_refused_by_name(feature):
    from ds_cp.patches.deepspeed import refuse_features

    base = engine.json_config(CP2, 1)
    refuse_features(base)
    with pytest.raises(
        ValueError, match=f'"{feature}" together with "context_parallel" is refused: .*Take one of the two'
    ):
        refuse_features(base | FEATURES[feature])


def start(config, **kwargs):
    import deepspeed

    engine.activate()
    return deepspeed.initialize(model=models.build(LLAMA), config=config, **kwargs)


def test_initialize_refuses_features_and_an_mpu_before_it_builds_anything(workers):
    workers(2).run_expecting_error(start, "deepcompile", engine.json_config(CP2, 1) | FEATURES["compile.deepcompile"])

    def with_mpu():
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        start(engine.json_config(CP2, 1), mpu=parallel_state_sp)

    workers(2).run_expecting_error(with_mpu, 'both "context_parallel" and an mpu or mesh')


def test_pipeline_modules_are_refused(workers):
    def pipeline():
        import deepspeed
        from deepspeed.pipe import PipelineModule

        engine.activate()
        stages = PipelineModule(
            [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss()
        )
        deepspeed.initialize(model=stages, config=engine.json_config(CP2, 1))

    workers(2).run_expecting_error(pipeline, "PipelineModule")


def test_the_users_batch_size_is_checked_by_groups(workers):
    wrong = engine.json_config(CP2, 1) | {"train_batch_size": 2}
    workers(2).run_expecting_error(start, "2 != 1 \\* 1 \\* 1", wrong)


def test_disabling_ds_cp_while_the_key_is_present_warns(workers):
    def switched_off():
        os.environ["DS_CP_DISABLE"] = "1"
        with pytest.warns(UserWarning, match="DS_CP_DISABLE is set: NO sequence is shared"):
            engine.activate()
            made, *_ = start(engine.json_config(CP2, 1) | {"train_batch_size": 2})
        return made.module.config._attn_implementation

    assert workers(2).run(switched_off) == ["sdpa", "sdpa"]
