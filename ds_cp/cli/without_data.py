"""Layers of a real model, run forward and backward on torch's meta device to see what they hold.

Its tensors have sizes and lifetimes but no data, and a stand-in for attention allocates what ds_cp's does. So the count
follows the model's own code and autograd's own order, and costs a second.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Iterator

import torch

from ds_cp.cli.bench.probes import PeakStorages
from ds_cp.patches.transformers import structure
from ds_cp.patches.transformers.memory import chunked_mlp
from ds_cp.planner import Plan

STAND_IN = "ds_cp_plan"


class WithoutData:
    """A causal LM on the meta device.

    Args:
        config: of the text model.
        dtype: that it computes in.

    Attributes:
        numbers: in all of its weights.
        of_head: in its output projection.
        kinds: (index of the first layer, how many) of each kind of layer: equal modules, equal shapes, equal type.
    """

    def __init__(self, config: Any, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(config)
        config.use_cache = False
        with _stand_in(None, False), torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=STAND_IN).train()
        head = self._model.get_output_embeddings()
        self.numbers = sum(weight.numel() for weight in self._model.parameters())
        self.of_head = 0 if head is None else head.weight.numel()
        self._dtype, self._decoder = dtype, structure.find_decoder(self._model)
        self._name, self._layers = next(
            (name, module)
            for name, module in self._decoder.named_children()
            if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
        )
        self._types = getattr(config, "layer_types", None) or [None] * len(self._layers)
        seen: dict[Any, list[int]] = {}
        for index, (layer, kind) in enumerate(zip(self._layers, self._types)):
            shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
            seen.setdefault((kind, type(layer), shapes), []).append(index)
        self.kinds = [(indices[0], len(indices)) for indices in seen.values()]

    def run(
        self, index: int, times: int, tokens: int, plan: Plan, checkpoints: bool, mlp_in_tiles: bool
    ) -> tuple[int, int]:
        """(bytes that live between forward and backward, the most that ever live) of so many layers of one kind."""
        config, decoder = self._decoder.config, self._decoder
        with _stand_in(plan, checkpoints), torch.device("meta"):
            copies = [copy.deepcopy(self._layers[index]) for _ in range(times)]
            setattr(decoder, self._name, torch.nn.ModuleList(copies))
            config.num_hidden_layers = times
            if self._types[0] is not None:
                config.layer_types = [self._types[index]] * times
            if checkpoints:
                with warnings.catch_warnings(action="ignore"):  # the name that every version knows
                    self._model.gradient_checkpointing_enable({"use_reentrant": False})
            chunked_mlp.attach(decoder, replace(plan, tiled_mlp=mlp_in_tiles))
            for weight in decoder.parameters():  # ZeRO takes gradients as they come
                weight.register_post_accumulate_grad_hook(_let_go)
            given = torch.empty(1, tokens, config.hidden_size, dtype=self._dtype, requires_grad=True)
            with PeakStorages() as storages:
                out = decoder(inputs_embeds=given, position_ids=torch.arange(tokens)[None]).last_hidden_state
                live = storages.live()
                out.backward(torch.empty_like(out))
        return live, storages.most


def _let_go(weight: torch.Tensor) -> None:
    weight.grad = None


@contextmanager
def _stand_in(plan: Plan, checkpoints: bool) -> Iterator[None]:
    """While this holds, attention by the stand-in's name keeps and allocates what ds_cp's would."""
    from transformers.modeling_utils import AttentionInterface

    waiting: dict[torch.nn.Module, torch.Tensor] = {}

    def attend(module, query, key, value, *args, **kwargs):
        known = waiting.pop(module, None)
        out = _Attention.apply(query, key, value, known, plan)
        if checkpoints and known is None and not plan.recompute_attention:
            waiting[module] = out.detach()
        return out.transpose(1, 2), None

    AttentionInterface.register(STAND_IN, attend)  # to a name without a mask function transformers hands no mask
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(STAND_IN, None)


class _Attention(torch.autograd.Function):
    """Allocates as :mod:`ds_cp.attention.attend` does: rows under way, sums in fp32, what is saved."""

    @staticmethod
    def forward(ctx, query, key, value, known, plan):
        batch, heads, length, _ = query.shape
        ctx.plan = plan
        out, lse = known, query.new_empty((batch, heads, length), dtype=torch.float32)
        if known is None:
            under_way = _under_way(plan, query, key, value)
            sums = query.new_empty((batch, length, heads, value.size(-1)), dtype=torch.float32)
            out = sums.to(query.dtype).transpose(1, 2)
            del under_way, sums
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        under_way = _under_way(ctx.plan, query, key, value, grad, grad)
        sums = [x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
        parcels = [x.new_empty(x.shape, dtype=torch.float32) for x in (key, value) * 3 if ctx.plan.ring > 1]
        del under_way, parcels
        return *(x.to(query.dtype) for x in sums), None, None


def _under_way(plan: Plan, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the tensors by heads and what arrives (ulysses), and K and V of three steps (ring)."""
    key, value = tensors[1:3]
    traded = [x.new_empty(x.shape) for x in tensors * 2 if plan.ulysses > 1]
    return traded + [x.new_empty(x.shape) for x in (key, value) * (2 + plan.ahead) if plan.ring > 1]
