"""T5's learned bias by bucket of the distance, and the gradient of its table, under every method."""

import pytest
import torch
from transformers import MT5Config, MT5EncoderModel, T5Config, T5EncoderModel

from harness import oracle, subject

TYPES = {"t5": (T5Config, T5EncoderModel), "mt5": (MT5Config, MT5EncoderModel)}
SIZES = dict(
    d_model=64, d_kv=8, d_ff=96, num_layers=2, num_heads=8, vocab_size=128, dropout_rate=0.0, initializer_factor=1.0,
    relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip
METHODS = [
    {"size": 2, "method": "ring"},
    {"size": 2, "method": "ulysses"},
    {"size": 2, "method": "allgather", "layout": "contiguous"},
    {"size": 4, "method": "ring"},
    {"size": 4, "method": "hybrid", "ulysses_size": 2},
]


def run(type_, config, checkpointing=None):
    """Loss and gradients of the encoder on two right-padded rows."""
    config_class, model_class = TYPES[type_]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative" in name:
                parameter.normal_()
    subject.enable_checkpointing(model, checkpointing)
    if config:
        import ds_cp

        ds_cp.context_parallel(model, config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 128, (2, 37), generator=generator)
    mask = (torch.arange(37) < torch.tensor([[37], [24]])).long()
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = torch.randn(hidden.shape, generator=generator) * mask[..., None]
    loss = (hidden * weights).square().sum() / 100  # a sum whose terms do not cancel
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("config", METHODS, ids=[f"{c['method']}-{c['size']}" for c in METHODS])
def test_the_bias_and_the_gradient_of_its_table_equal_one_process(workers, type_, config):
    loss, gradients = workers(1).run(run, type_, None)[0]
    assert any("relative" in name and grad.norm() > 1e-2 for name, grad in gradients.items())
    ranks = workers(config["size"]).run(run, type_, config)
    oracle.assert_close_loss(ranks[0][0], loss, 1e-5)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpointing_keeps_the_tables_gradient(workers, checkpointing):
    _, gradients = workers(1).run(run, "t5", None)[0]
    ranks = workers(2).run(run, "t5", METHODS[0], checkpointing)
    oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in ranks]), gradients, 1e-5)
