"""TRL's fused LM head scores this rank's tokens; the per-token results are gathered, [B, L] to [B, S].

TRL's ``add_fused_lm_head`` sets a ``forward`` on the model that runs the backbone and then TRL's kernel on all tokens. The
``forward`` that is bound over it leaves the hidden states local and has TRL's function score those.
"""

from __future__ import annotations

import functools
import weakref
from types import MethodType, SimpleNamespace
from typing import Any, Callable

import torch

from ds_cp.loss import shift_left
from ds_cp.patches.transformers.ambient import current_task_head
from ds_cp.patches.transformers.models.introspection import closure_variables
from ds_cp.region import Region

IGNORE_INDEX = -100
PER_TOKEN_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of TRL's output with one value per token. The first two are differentiable."""


def attach(model: torch.nn.Module) -> Callable[[], None]:
    """Bind the local form of TRL's fused head, if the model has one. Returns a function that undoes it."""
    instance_forward: Any = vars(model).get("forward")
    trl_forward: Any = getattr(instance_forward, "__func__", None)
    if getattr(trl_forward, "__globals__", {}).get("__name__") != "trl.trainer.utils":
        return lambda: None
    local_forward = functools.wraps(trl_forward)(functools.partial(_forward, trl_forward))
    model.forward = MethodType(local_forward, model)
    model_ref = weakref.ref(model)

    def undo() -> None:
        if (alive := model_ref()) is not None and is_fused(alive):
            alive.forward = MethodType(vars(alive)["forward"].__func__.args[0], alive)

    return undo


def is_fused(model: torch.nn.Module) -> bool:
    """Whether the model's fused head scores local hidden states."""
    bound = getattr(vars(model).get("forward"), "__func__", None)
    return isinstance(bound, functools.partial) and bound.func is _forward


def plain_forward(model: torch.nn.Module) -> Any:
    """The instance's forward that a call without ``fused_lm_head`` runs; None if that is the class's own."""
    if not is_fused(model):
        return vars(model).get("forward")
    trl_forward = vars(model)["forward"].__func__.args[0]
    inner = closure_variables(trl_forward).get("original_forward")
    return None if getattr(inner, "__func__", None) is type(model).forward else inner


def _forward(trl_forward: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    call = current_task_head()
    if not kwargs.get("fused_lm_head") or call is None or not call.keeps_local:
        return trl_forward(self, *args, **kwargs)
    del kwargs["fused_lm_head"]
    labels, shift_labels, num_items = (
        kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch")
    )
    backbone_output = self.base_model(*args, **kwargs | {"use_cache": False})
    call.consumed = True
    targets = shift_left(labels, IGNORE_INDEX) if shift_labels is None else shift_labels
    region = call.region
    local_targets = targets if region is None else region.shard(targets, dim=-1, pad_value=IGNORE_INDEX)
    # TRL's own function, with its settings, on local hidden states. It does not shift labels passed as shift_labels.
    local_model = SimpleNamespace(
        base_model=lambda *_, **__: backbone_output, get_output_embeddings=self.get_output_embeddings
    )
    output = trl_forward(local_model, fused_lm_head=True, shift_labels=local_targets)
    end = targets.size(1) if shift_labels is not None else targets.size(1) - 1
    for name in PER_TOKEN_OUTPUTS:
        value = getattr(output, name)
        if value is not None and region is not None:
            value = _gather(value, region)
        setattr(output, name, None if value is None else value[:, :end])
    output.label_mask = (targets != IGNORE_INDEX)[:, :end].to(output.log_probs.device)
    count = output.label_mask.sum().clamp(min=1) if num_items is None else num_items
    output.loss = -output.log_probs.sum() / count
    return output


def _gather(local: torch.Tensor, region: Region) -> torch.Tensor:
    """[B, L] to [B, S]; bool is sent as uint8, because collectives do not take bool."""
    if local.dtype != torch.bool:
        return region.gather(local)
    return region.gather(local.to(torch.uint8)).bool()
