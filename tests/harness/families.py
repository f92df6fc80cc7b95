"""Every causal LM type of the installed transformers: compared with one process, or refused; nothing else counts."""

import copy
import signal
from dataclasses import dataclass

import torch

from ds_cp.cli import compare
from ds_cp.cli.shrink import VOCAB, tiny_config
from harness.models import TransformersInDouble

SECONDS = 40


@dataclass(frozen=True)
class Outcome:
    """What became of one type: "exact", "refused", "wrong", "not built"."""

    type: str
    verdict: str
    detail: str = ""


def causal_lm_types():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type),
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped matmul knows no fp64
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def outcome(model_type, methods=("ring", "ulysses")):
    """Run on every rank of two: what becomes of the type."""
    import ds_cp
    from ds_cp.agreement import BatchError
    from ds_cp.config import ConfigError

    def too_slow(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    dense, packed = compare.batches(VOCAB)
    try:
        model = build(model_type)
        truths = {"dense": compare.truth(model, dense, TransformersInDouble)}
    except Exception as error:  # not a fault of ds_cp: the tiny config does not build or run without it
        return Outcome(model_type, "not built", _first_line(error))
    worst, note = 0.0, ""
    for method in methods:
        shared = copy.deepcopy(model)
        try:
            ds_cp.context_parallel(shared, {"size": 2, "method": method, "unverified": "allow", "timeout": 20})
            for batch in (dense, packed):
                try:
                    got = compare.shared(shared, batch)
                except BatchError as error:
                    if batch is dense or "does not pass position_ids on" not in str(error):
                        raise
                    note = "; packed rows are refused"
                    continue
                if batch.name not in truths:
                    truths[batch.name] = compare.truth(model, batch, TransformersInDouble)
                error = compare.error(got, truths[batch.name].want)
                if not error <= truths[batch.name].tolerance:
                    return Outcome(model_type, "wrong", f"{method}, {batch.name}: error {error:.1e}")
                worst = max(worst, error)
        except (ConfigError, BatchError) as error:
            return Outcome(model_type, "refused", _reason(error))
        except Exception as error:
            return Outcome(model_type, "wrong", f"{method}: {_first_line(error)}")
    return Outcome(model_type, "exact", f"{worst:.0e}{note}")


def _reason(error):
    lines = [line.removeprefix("- ") for line in str(error).splitlines()]
    return next((line for line in lines if line and "cannot be shared exactly" not in line), lines[0])


def _first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
