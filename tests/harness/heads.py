"""Models with any head beside one process: the same weights, the same batch, every output and every gradient."""

import torch
import transformers

from ds_cp.cli.shrink import tiny_config
from ds_cp.cli.sizes import VOCAB
from harness import models, oracle, subject

LENGTH = 37
ROWS = 2


def build(class_name, model_type, dtype=torch.float64, attention="eager", **overrides):
    """The same weights for the same arguments; in training mode."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **overrides)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.pad_token_id = 0  # heads that pool look for the last token that is none
    model = getattr(transformers, class_name)._from_config(config, attn_implementation=attention, dtype=torch.float32)
    models._make_every_parameter_matter(model)
    return model.to(dtype).train()


def tokens(rows=ROWS, length=LENGTH, seed=1):
    return torch.randint(5, VOCAB - 10, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(side, rows=ROWS, length=LENGTH):
    """The first row is whole, the second loses 13 tokens."""
    index, lost = torch.arange(length), 13
    short = index < length - lost if side == "right" else index >= lost
    return torch.stack([torch.ones(length, dtype=torch.bool), *[short] * (rows - 1)]).long()


def outputs(model, inputs, seen=None):
    """Loss, every other tensor that comes back by name, and gradients. Without a loss of its own: the mean squares of all
    that comes back."""
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = sum(_seen(value, seen).pow(2).mean() for value in _flat(out).values() if value.is_floating_point())
    loss.backward()
    return loss.item(), {name: value.detach() for name, value in _flat(out).items()}, oracle.gradients_of(model)


def _seen(value, seen):
    """Without padding, where the value is per token."""
    return value[seen] if seen is not None and value.shape[: seen.dim()] == seen.shape else value


def _flat(out, prefix=""):
    found = {}
    for name, value in out.items() if hasattr(out, "items") else enumerate(out):
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, (tuple, list)):
            found |= _flat(value, f"{prefix}{name}.")
        elif type(value).__name__ == "LocalLogits":
            found[f"{prefix}{name}"] = value.whole()
    return found


def precision(checkpointing):
    """The mode that keeps fp64 in transformers' code does not reach the backward pass, where layers run again."""
    return torch.float64 if checkpointing is None else torch.float32


def shared(make, config, inputs, checkpointing=None, seen=None):
    """The same on an attached model, on every rank."""
    import ds_cp

    model = make(dtype=precision(checkpointing))
    subject.enable_checkpointing(model, checkpointing)
    ds_cp.context_parallel(model, config)
    with subject.in_full_precision(precision(checkpointing)):
        return outputs(model, inputs, seen)


def check(workers, make, config, inputs, checkpointing=None, seen=None, tolerance=1e-9):
    """`seen`: [rows, S] bool, where hidden states and logits per token mean something (no padding)."""
    tolerance = tolerance if checkpointing is None else 1e-5
    with subject.in_full_precision(precision(checkpointing)):
        loss, tensors, gradients = outputs(make(dtype=precision(checkpointing)), inputs, seen)
    assert oracle.total_norm(gradients) > 0
    ranks = workers(config["size"]).run(shared, make, config, inputs, checkpointing, seen)
    for got_loss, got, _ in ranks:
        oracle.assert_close_loss(got_loss, loss, tolerance)
        assert got.keys() == tensors.keys()
        for name, want in tensors.items():
            _assert_close(name, got[name], want, seen, tolerance)
    oracle.assert_close_gradients(oracle.mean_over_ranks([rank[2] for rank in ranks]), gradients, tolerance)


def _assert_close(name, got, want, seen, tolerance):
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = _seen(got, seen), _seen(want, seen)
    error = (got - want).double().norm()
    assert error <= tolerance * want.double().norm(), f"{name} differs by {error / want.double().norm():.1e}"
