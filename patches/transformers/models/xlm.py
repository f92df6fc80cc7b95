"""XLM: attention outside the attention interface, and masks that the model builds itself.

XLM derives its mask from ``attention_mask``, ``lengths`` or padding ids, gives it to each layer as a tensor, and multiplies
hidden states of padding by 0. :func:`attach` computes the padding mask of the whole batch and gives the model this rank's
part of it, for the hidden states; :func:`attend` takes the mask descriptor of the region instead of the layer's tensor.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch

from ds_cp.mask.rules import CAUSAL, EVERYTHING
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.ambient import current_region
from ds_cp.patches.transformers.attention import attention_forward
from ds_cp.patches.transformers.models.region_mask import mask_of_current_region
from ds_cp.patches.transformers.models.replacement import Replacement


def attend(
    original: Callable[..., Any],
    self: Any,
    input: torch.Tensor,
    mask: torch.Tensor,
    kv: torch.Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """XLM's MultiHeadAttention.forward: [B, L, dim] to [B, L, dim]. ``mask`` is [B, L], or [B, L, L] if it is causal."""
    descriptor = mask_of_current_region(CAUSAL if mask.dim() == 3 else EVERYTHING, self)
    if descriptor is None:
        return original(input, mask, kv=kv, cache=cache, output_attentions=output_attentions, **kwargs)
    query, key, value = (
        project(input).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for project in (self.q_lin, self.k_lin, self.v_lin)
    )
    dropout = self.dropout if self.training else 0.0
    out, _ = attention_forward(self, query, key, value, descriptor, dropout)
    return (self.out_lin(out.flatten(2)),)


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Hook an XLM model so that it gets its padding mask as an argument; returns what removes the hooks. Other models are
    left as they are."""
    if type(decoder).__name__ != "XLMModel":
        return lambda: None
    signature = inspect.signature(decoder.forward)
    masks: list[torch.Tensor] = []  # the padding mask [B, S] of the running forward

    @torch.compiler.disable
    def add_padding_mask(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace ``lengths`` and padding ids by the mask that the model would derive from them."""
        arguments = batches.arguments_by_name(signature, args, kwargs)
        mask, lengths, ids = (arguments.get(name) for name in ("attention_mask", "lengths", "input_ids"))
        if mask is None:
            tokens = ids if ids is not None else arguments["inputs_embeds"][..., 0]
            if lengths is None:
                lengths = (tokens != module.pad_index).sum(dim=1) if ids is not None else None
            index = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape)
            mask = torch.ones_like(index) if lengths is None else (index < lengths[:, None]).long()
        masks[:] = [mask]  # replaced, not appended: the stack's hook, which runs next, may refuse the batch
        return (), arguments | {"attention_mask": mask, "lengths": None}

    @torch.compiler.disable
    def shard_padding_mask(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        region, mask = current_region(), masks.pop()
        if region is None:
            return None
        local_mask = region.shard(mask)
        positions = kwargs["position_ids"].expand(local_mask.shape)
        return args, kwargs | {"attention_mask": local_mask, "position_ids": positions}

    handles = [  # before and after the stack's own hook, which opens the region
        decoder.register_forward_pre_hook(add_padding_mask, with_kwargs=True, prepend=True),
        decoder.register_forward_pre_hook(shard_padding_mask, with_kwargs=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


REPLACED: dict[str, Replacement] = {"modeling_xlm.MultiHeadAttention": Replacement(attend)}
