"""Outcome of every causal LM type of the installed transformers: compared with one process, or refused."""

import contextlib
import copy
import signal
from dataclasses import dataclass

import torch

from ds_cp.cli import compare
from ds_cp.cli.shrink import causal_lm, empty_model, tiny_config
from ds_cp.cli.sizes import VOCAB
from harness.models import TransformersInDouble

SECONDS = 50


@contextlib.contextmanager
def in_double():
    """Compute in fp64, including tensors that a model creates with the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        with TransformersInDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


METHODS = {2: ("ring", "ulysses"), 4: ("hybrid",)}
NOTES = {"doge": "; rows longer than keep_window_size are refused"}
PACKED_REFUSED = "does not pass position_ids on"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one type: "exact", "refused", "wrong" or "not built"."""

    type: str
    verdict: str
    detail: str = ""


def causal_lm_types():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type, config=None):
    """A tiny model of the type with random norms and biases."""
    torch.manual_seed(0)
    model = causal_lm(
        config or tiny_config(model_type),
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped matmul does not support fp64
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def missing_kinds(model_type, tiny):
    """Classes of modules of the default-size model, built on the meta device, that the tiny model does not have.

    Modules inside of a tower of timm are ignored.
    """
    return sorted(_kinds(empty_model(model_type)) - _kinds(tiny))


def _kinds(module):
    if type(module).__name__ == "TimmWrapperModel":
        return set()
    return {type(module).__name__}.union(*map(_kinds, module.children()))


def outcome(model_type):
    """The outcome of a type; runs on every rank, with the methods for this number of ranks."""
    import ds_cp
    from ds_cp.agreement import BatchError
    from ds_cp.config import ConfigError

    def too_slow(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    size = torch.distributed.get_world_size()
    refusal = refused_at_start(model_type)
    if refusal:
        return refusal
    try:
        model = build(model_type)
        missing = missing_kinds(model_type, model)
        dense, packed = compare.causal_lm_batches(model, VOCAB)
        truths = {"dense": compare.reference(model, dense, in_double)}
    except Exception as error:  # the tiny model does not run without ds_cp either
        return Outcome(model_type, "not built", _first_line(error))
    if missing:
        return Outcome(model_type, "not built", f"the tiny model has no {', '.join(missing)}")
    worst, note = 0.0, ""
    for method in METHODS[size]:
        shared, opened = copy.deepcopy(model), 0
        try:
            ds_cp.context_parallel(shared, {"size": size, "method": method, "unverified": "allow", "timeout": 20})
            for batch in (dense, packed):
                try:
                    loss, gradients = compare.context_parallel(shared, batch)
                except BatchError as error:
                    if batch is dense or PACKED_REFUSED not in str(error):
                        raise
                    note = "; packed rows are refused"
                    continue
                if batch.name not in truths:
                    truths[batch.name] = compare.reference(model, batch, in_double)
                error = compare.errors(loss, gradients, truths[batch.name]).worst
                opened += 1
                if shared_forwards(shared) < opened:
                    return Outcome(model_type, "wrong", f"{method}, {batch.name}: runs whole on every rank")
                if not error <= truths[batch.name].tolerance and not _exact_in_double(model, method, batch, error):
                    return Outcome(model_type, "wrong", f"{method}, {batch.name}: error {error:.1e}")
                worst = max(worst, error)
        except (ConfigError, BatchError) as error:
            return Outcome(model_type, "refused", _reason(error))
        except Exception as error:
            return Outcome(model_type, "wrong", f"{method}: {_first_line(error)}")
    return Outcome(model_type, "exact", f"{worst:.0e}{note}{NOTES.get(model_type, '')}")


def _exact_in_double(model, method, batch, error):
    """Whether a small error is rounding, as for gradients that are zero: the error in fp64 is below 1e-9."""
    import ds_cp

    if not error < 1e-4:
        return False
    twin = copy.deepcopy(model).double()
    with in_double():
        ds_cp.context_parallel(
            twin, {"size": torch.distributed.get_world_size(), "method": method, "unverified": "allow"}
        )
        loss, gradients = compare.context_parallel(twin, batch)
        gradients = [*gradients]
    own = compare.reference(model, batch, in_double)
    return compare.errors(loss, gradients, own).worst < 1e-9


def shared_forwards(model):
    """Number of sharded forwards of an attached model."""
    from ds_cp.patches.transformers import attach

    return attach.attachment(model).forwards


def refused_at_start(model_type):
    """The refusal of a model of default size on the meta device, or None."""
    from ds_cp.config import ConfigError
    from ds_cp.patches.transformers import support

    try:
        model = empty_model(model_type)
    except Exception:  # transformers cannot build it
        return None
    try:
        support.check_model(model, "allow")
    except ConfigError as error:
        return Outcome(model_type, "refused", _reason(error))
    return None


def _reason(error):
    lines = [line.removeprefix("- ") for line in str(error).splitlines()]
    return next((line for line in lines if line and "cannot be shared exactly" not in line), lines[0])


def _first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
