"""Models with any task head: every output and every gradient compared with one process."""

import torch
import transformers

from ds_cp.cli.shrink import tiny_config
from ds_cp.cli.sizes import VOCAB
from harness import models, oracle, subject

LENGTH = 37
ROWS = 2


def build(class_name, model_type, dtype=torch.float64, attention="eager", **overrides):
    """A tiny model in training mode; equal arguments give equal weights."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **overrides)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.pad_token_id = 0  # pooling heads use the last token that is not padding
    model = getattr(transformers, class_name)._from_config(config, attn_implementation=attention, dtype=torch.float32)
    models._make_every_parameter_matter(model)
    return model.to(dtype).train()


def tokens(rows=ROWS, length=LENGTH, seed=1):
    return torch.randint(5, VOCAB - 10, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(side, rows=ROWS, length=LENGTH):
    """A mask with no padding in the first row and 13 positions in the others."""
    index, lost = torch.arange(length), 13
    short = index < length - lost if side == "right" else index >= lost
    return torch.stack([torch.ones(length, dtype=torch.bool), *[short] * (rows - 1)]).long()


def outputs(model, inputs, seen=None):
    """Loss, returned tensors by name, and gradients. Without a returned loss, the loss is the sum of the mean squares of
    the returned tensors."""
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        loss = sum(_seen(value, seen).pow(2).mean() for value in _flat(out).values() if value.is_floating_point())
    loss.backward()
    return loss.item(), {name: value.detach() for name, value in _flat(out).items()}, oracle.gradients_of(model)


def _seen(value, seen):
    """`value` without padding, if it is per token."""
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
    """fp32 with checkpointing, since the mode that keeps fp64 is inactive where the backward pass recomputes layers."""
    return torch.float64 if checkpointing is None else torch.float32


def shared(make, config, inputs, checkpointing=None, seen=None):
    """`outputs` of an attached model; runs on every rank."""
    import ds_cp

    model = make(dtype=precision(checkpointing))
    subject.enable_checkpointing(model, checkpointing)
    ds_cp.context_parallel(model, config)
    with subject.in_full_precision(precision(checkpointing)):
        return outputs(model, inputs, seen)


def check(workers, make, config, inputs, checkpointing=None, seen=None, tolerance=1e-9):
    """Compare with one process. `seen`: [rows, S] bool, false at padding, where outputs per token are undefined."""
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
