"""TRL: its fused LM head scores this rank's tokens; what it returns per token is gathered as [B, S] scalars.

``add_fused_lm_head`` sets a ``forward`` on the model that calls the backbone, then TRL's kernel on all tokens. Bound over
it is one that leaves the hidden states local and has TRL's own function score them.
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

IGNORED = -100
DIFFERENTIABLE = ("log_probs", "entropy")
PER_TOKEN = (*DIFFERENTIABLE, "log_sum_sq_probs", "mean_logits", "is_top1")


def attach(head: torch.nn.Module) -> Callable[[], None]:
    """Bind the local form of TRL's fused head, where the model has one; returns what undoes it."""
    before = vars(head).get("forward")
    if getattr(getattr(before, "__func__", None), "__globals__", {}).get("__name__") != "trl.trainer.utils":
        return lambda: None
    fused = functools.wraps(before.__func__)(functools.partial(_forward, before.__func__))
    head.forward = MethodType(fused, head)
    alive = weakref.ref(head)

    def undo() -> None:
        if (model := alive()) is not None and is_fused(model):
            model.forward = MethodType(vars(model)["forward"].__func__.args[0], model)

    return undo


def is_fused(head: torch.nn.Module) -> bool:
    """True for a head that scores local hidden states by itself."""
    bound = getattr(vars(head).get("forward"), "__func__", None)
    return isinstance(bound, functools.partial) and bound.func is _forward


def plain_forward(head: torch.nn.Module) -> Any:
    """The instance forward that calls without ``fused_lm_head`` end in, None if it is the class's own."""
    if not is_fused(head):
        return vars(head).get("forward")
    fused = vars(head)["forward"].__func__.args[0]
    inner = closure_variables(fused).get("original_forward")
    return None if getattr(inner, "__func__", None) is type(head).forward else inner


def _forward(fused: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    call = current_task_head()
    if not kwargs.get("fused_lm_head") or call is None or not call.keeps_local:
        return fused(self, *args, **kwargs)
    del kwargs["fused_lm_head"]
    labels, shifted, num_items = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    backbone = self.base_model(*args, **kwargs | {"use_cache": False})
    call.consumed = True
    targets = shift_left(labels, IGNORED) if shifted is None else shifted
    region = call.region
    local = targets if region is None else region.shard(targets, dim=-1, pad_value=IGNORED)
    # TRL's own function, with its settings, on what is here: labels that need no shift are scored as they stand
    here = SimpleNamespace(base_model=lambda *_, **__: backbone, get_output_embeddings=self.get_output_embeddings)
    output = fused(here, fused_lm_head=True, shift_labels=local)
    end = targets.size(1) if shifted is not None else targets.size(1) - 1
    for name in PER_TOKEN:
        found = getattr(output, name)
        if found is not None and region is not None:
            found = _gather(found, region)
        setattr(output, name, None if found is None else found[:, :end])
    output.label_mask = (targets != IGNORED)[:, :end].to(output.log_probs.device)
    count = output.label_mask.sum().clamp(min=1) if num_items is None else num_items
    output.loss = -output.log_probs.sum() / count
    return output


def _gather(local: torch.Tensor, region: Region) -> torch.Tensor:
    """[B, L] to [B, S]; collectives know no truth values."""
    if local.dtype != torch.bool:
        return region.gather(local)
    return region.gather(local.to(torch.uint8)).bool()
