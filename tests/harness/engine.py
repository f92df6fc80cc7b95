"""One optimizer step with a DeepSpeed engine: losses, reduced gradients and updates."""

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  initialize imports it: 4 s that no forked rank should pay
import torch
from deepspeed.utils import safe_get_full_grad

from harness import batches, models, oracle, subject

LEARNING_RATE = 10.0  # large, so that the update determines the gradient to seven digits
SGD = {"type": "SGD", "params": {"lr": LEARNING_RATE}}


def json_config(context_parallel, stage, rows=1, accumulation=1, dp=1, **more):
    """A DeepSpeed config. `more` replaces keys and is merged into `zero_optimization`."""
    zero = {"stage": stage, "reduce_bucket_size": 5000}  # small: several buckets even for a tiny model
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000}
    zero |= more.pop("zero_optimization", {})
    config = {
        "train_batch_size": rows * accumulation * dp,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": SGD,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "steps_per_print": 10**6,
    }
    if context_parallel:
        config["context_parallel"] = context_parallel
    return config | more


def activate():
    """What `import torch` does when ds_cp is installed."""
    from ds_cp import _autoload

    _autoload.activate()


def initialize(config, model):
    """The engine of ``deepspeed.initialize``."""
    activate()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.train_batch_size() == config["train_batch_size"]
    return engine


def step(engine, inputs_of_micro_batches):
    """Losses of the micro-batches, reduced gradients, and updates of the weights divided by -lr."""
    before = full_weights(engine.module)
    losses = []
    for index, inputs in enumerate(inputs_of_micro_batches):
        loss = engine(**inputs).loss
        engine.backward(loss)
        losses.append(loss.item())
        if index == len(inputs_of_micro_batches) - 1:
            gradients = full_gradients(engine.module)
        engine.step()
    after = full_weights(engine.module)
    updates = {name: (before[name] - after[name]) / LEARNING_RATE for name in before}
    return losses, gradients, updates


def train_one_step(model_spec, config, batch_specs_of_groups, checkpointing=None, dtype=torch.float32):
    model = models.build(model_spec, dtype)
    subject.enable_checkpointing(model, checkpointing)
    engine = initialize(config, model)
    mine = batch_specs_of_groups[subject.data_parallel_rank(config["context_parallel"]["size"])]
    return step(engine, [batches.make(spec).inputs for spec in mine])


def full_weights(model):
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def full_gradients(model):
    return {name: safe_get_full_grad(parameter).double() for name, parameter in model.named_parameters()}


def check(results, truth, losses_of_groups, rounding=0.0):
    """Compare losses, reduced gradients and updates of every rank with the truth.

    Args:
        rounding: the error of one process in fp32, for models whose gradients have large rounding errors.
    """
    tolerance = max(oracle.TOLERANCE[torch.float32], 1.5 * rounding)
    size = len(results) // len(losses_of_groups)
    for rank, (losses, gradients, updates) in enumerate(results):
        for got, want in zip(losses, losses_of_groups[rank // size], strict=True):
            oracle.assert_close_loss(got, want, oracle.LOSS_TOLERANCE[torch.float32])
        oracle.assert_close_gradients(gradients, truth.gradients, tolerance)
        oracle.assert_close_gradients(updates, truth.gradients, tolerance)
