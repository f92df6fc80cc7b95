"""XLM: it makes its masks by itself, from lengths or from padding ids, and zeroes hidden states of padding."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch

from ds_cp.mask.rules import CAUSAL, EVERYTHING
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.eager_only import of_running
from ds_cp.patches.transformers.models.replacement import Replacement


def attend(original: Callable, self: Any, input, mask, kv=None, cache=None, output_attentions=False, **kwargs):
    """XLM's MultiHeadAttention: [B, L, dim] to the same; its mask is [B, L], or [B, L, L] when it is causal."""
    descriptor = of_running(CAUSAL if mask.dim() == 3 else EVERYTHING, self)
    if descriptor is None:
        return original(input, mask, kv=kv, cache=cache, output_attentions=output_attentions, **kwargs)
    query, key, value = (
        project(input).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for project in (self.q_lin, self.k_lin, self.v_lin)
    )
    rate = self.dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, descriptor, rate)
    return (self.out_lin(out.flatten(2)),)


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Give an XLM model its mask whole, before its sequence is cut; returns what undoes it. No other model changes."""
    if type(decoder).__name__ != "XLMModel":
        return lambda: None
    signature = inspect.signature(decoder.forward)
    masks: list[torch.Tensor] = []

    def spell_out(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What the model would make of lengths and ids, as a mask."""
        arguments = batches.arguments_by_name(signature, args, kwargs)
        mask, lengths, ids = (arguments.get(name) for name in ("attention_mask", "lengths", "input_ids"))
        if mask is None:
            tokens = ids if ids is not None else arguments["inputs_embeds"][..., 0]
            if lengths is None:
                lengths = (tokens != module.pad_index).sum(dim=1) if ids is not None else None
            index = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape)
            mask = torch.ones_like(index) if lengths is None else (index < lengths[:, None]).long()
        masks[:] = [mask]  # not a push: the border's hook, which stands between, may refuse the batch
        return (), arguments | {"attention_mask": mask, "lengths": None}

    def cut(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        region, mask = current_region(), masks.pop()
        if region is None:
            return None
        mine = region.shard(mask)
        return args, kwargs | {"attention_mask": mine, "position_ids": kwargs["position_ids"].expand(mine.shape)}

    handles = [  # one before the border's hook, one behind it
        decoder.register_forward_pre_hook(torch.compiler.disable(spell_out), with_kwargs=True, prepend=True),
        decoder.register_forward_pre_hook(torch.compiler.disable(cut), with_kwargs=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


REPLACED: dict[str, Replacement] = {"modeling_xlm.MultiHeadAttention": Replacement(attend)}
