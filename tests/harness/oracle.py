"""The oracle: one process, fp64, eager attention, each document alone. It never imports ds_cp."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import cross_entropy

from data.models import TRUE_ATTENTION
from harness import batches, models

# per parameter: |g - g*| <= tolerance * max(|g*|, FLOOR * |all g*|)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOSS_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}
FLOOR = 1e-3


@dataclass(frozen=True)
class Truth:
    loss: float
    gradients: dict  # by parameter name
    logits: list  # one tensor [row, t, vocab] per batch, NaN where there is no document


@lru_cache(maxsize=64)
def truth(model_spec, *batch_specs, weights=None):
    """Mean loss over the batches (data-parallel ranks, micro-batches), its gradients, and the logits of each batch.

    Args:
        weights: a dtype to which the weights are rounded first.
    """
    model = models.build(model_spec, attention=TRUE_ATTENTION.get(model_spec.type, "eager"))
    model = models.rounded(model, weights or torch.float32).eval()
    return truth_of(model, [batches.make(spec) for spec in batch_specs])


def truth_of(model, made):
    """The truth of a given model and batches. Overwrites the gradients of the model."""
    model.zero_grad()
    losses, logits = [], []
    with models.TransformersInDouble():
        for batch in made:
            logits.append(logits_of_documents_alone(model, batch))
            losses.append(loss_of(logits[-1], batch))
    loss = sum(losses) / len(losses)
    if loss.requires_grad:
        loss.backward()
    return Truth(loss.item(), gradients_of(model), [each.detach() for each in logits])


def rounding(model_spec, *batch_specs):
    """The largest relative error of a gradient in one process in fp32."""
    model = models.build(model_spec, attention=TRUE_ATTENTION.get(model_spec.type, "eager")).eval()
    made = [batches.make(spec) for spec in batch_specs]
    (sum(loss_of(logits_of_documents_alone(model, batch), batch) for batch in made) / len(made)).backward()
    return max(gradient_errors(gradients_of(model), truth(model_spec, *batch_specs).gradients).values())


def logits_of_documents_alone(model, batch):
    rows = []
    for row in range(batch.targets.shape[0]):
        pieces, end = [], 0
        for document in (document for document in batch.documents if document.row == row):
            pieces.append(_nothing(model, document.start - end))
            ids = batch.inputs["input_ids"][row : row + 1, document.start : document.stop]
            positions = document.position + torch.arange(ids.shape[1])[None]
            pieces.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0])
            end = document.stop
        pieces.append(_nothing(model, batch.targets.shape[1] - end))
        rows.append(torch.cat(pieces))
    return torch.stack(rows)


def _nothing(model, length):
    return torch.full((length, model.config.vocab_size), float("nan"), dtype=model.dtype)


def loss_of(logits, batch):
    """Sum over the valid tokens, divided by their number or by `num_items_in_batch`; NaN without valid tokens."""
    valid = batch.targets != batches.IGNORE
    divisor = batch.inputs.get("num_items_in_batch", batch.valid_tokens)
    if not batch.valid_tokens:
        return torch.zeros((), dtype=logits.dtype) / divisor
    return cross_entropy(logits[valid], batch.targets[valid], reduction="sum") / divisor


def gradients_of(model):
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def mean_over_ranks(gradients):
    """The mean over all ranks, as DeepSpeed reduces gradients."""
    return {name: sum(rank[name].double() for rank in gradients) / len(gradients) for name in gradients[0]}


def gradient_errors(got, want):
    """Relative errors by parameter."""
    assert got.keys() == want.keys(), f"parameters differ: {sorted(got.keys() ^ want.keys())}"
    everything = total_norm(want)
    errors = {}
    for name in want:
        scale = max(want[name].norm().item(), FLOOR * everything)
        difference = (got[name].double() - want[name].double()).norm().item()
        errors[name] = difference / scale if scale else difference
    return errors


def total_norm(gradients):
    return sum(gradient.double().norm().item() ** 2 for gradient in gradients.values()) ** 0.5


def total_error(got, want):
    """|g - g*| / |g*| over all parameters together."""
    return total_norm({name: got[name].double() - want[name].double() for name in want}) / total_norm(want)


def assert_close_gradients(got, want, tolerance):
    errors = gradient_errors(got, want)
    worst = sorted(errors, key=lambda name: _nan_first(errors[name]), reverse=True)[:5]
    lines = [
        f"  {errors[name]:.2e}  {name}  |g|={got[name].norm():.3e}  |g*|={want[name].norm():.3e}" for name in worst
    ]
    too_far = [name for name in errors if not errors[name] <= tolerance]
    message = f"{len(too_far)} of {len(errors)} gradients are off by more than {tolerance:g}; the worst:\n"
    assert not too_far, message + "\n".join(lines)


def assert_close_logits(got, want, tolerance):
    """Compare the logits of each token relative to their norm; NaN in `want` marks padding."""
    defined = ~want[..., 0].isnan()
    assert got.shape == want.shape
    errors = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    wrong = (defined & ~(errors <= tolerance)).nonzero().tolist()
    assert not wrong, f"logits differ at [row, token] {wrong}, by up to {errors[defined].max():.2e}"


def assert_close_loss(got, want, tolerance):
    same = abs(got - want) <= tolerance * abs(want) or (got != got and want != want)
    assert same, f"loss {got!r}, want {want!r}, {abs(got - want):.2e} apart"


def _nan_first(error):
    return float("inf") if error != error else error
