"""How many bytes the layers of a model hold, counted on torch's meta device.

Tensors on the meta device have shapes and lifetimes but no data. Layers run forward and backward there with the model's own
code and in autograd's own order, while a replacement of attention allocates what ds_cp's attention does. This takes about a
second and no memory.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterator

import torch

from ds_cp.cli.bench.probes import PeakStorages
from ds_cp.patches.transformers import structure
from ds_cp.patches.transformers.memory import chunked_mlp
from ds_cp.planner import Plan

ATTENTION_NAME = "ds_cp_plan"
"""Name of the replacement in the attention interface of transformers."""

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]


class MetaModel:
    """A causal LM on the meta device.

    Args:
        config: Config of the text model.
        dtype: Dtype of weights and activations.

    Attributes:
        num_weights: Number of elements of all weights.
        num_lm_head_weights: Number of elements of the LM head's weight, 0 without an LM head.
        layer_kinds: One pair (index of the first layer, number of layers) per kind of layer. Layers are of one kind if they
            have the same class, the same shapes of weights and the same entry in ``config.layer_types``.
    """

    def __init__(self, config: Any, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(config)
        config.use_cache = False
        with _registered(_not_called), torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION_NAME
            ).train()
        lm_head = self._model.get_output_embeddings()
        self.num_weights: int = sum(weight.numel() for weight in self._model.parameters())
        self.num_lm_head_weights: int = 0 if lm_head is None else lm_head.weight.numel()
        self._dtype, self._decoder = dtype, structure.find_decoder(self._model)
        self._layers_name, self._layers = next(
            (name, module)
            for name, module in self._decoder.named_children()
            if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
        )
        self._layer_types = getattr(config, "layer_types", None) or [None] * len(self._layers)
        indices_of_kind: dict[Any, list[int]] = {}
        for index, (layer, layer_type) in enumerate(zip(self._layers, self._layer_types)):
            shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
            indices_of_kind.setdefault((layer_type, type(layer), shapes), []).append(index)
        self.layer_kinds = [(indices[0], len(indices)) for indices in indices_of_kind.values()]

    def run(
        self, index: int, num_layers: int, tokens: int, plan: Plan, checkpointing: bool, chunked_mlps: bool
    ) -> tuple[int, int]:
        """Run forward and backward of a decoder with ``num_layers`` copies of the layer at ``index``.

        Args:
            index: Index of the layer in the model.
            num_layers: Number of copies.
            tokens: Number of local tokens.
            plan: Plan of the model; its ``tiled_mlp`` is not used.
            checkpointing: Whether layers run under gradient checkpointing.
            chunked_mlps: Whether MLPs run on chunks of tokens.

        Returns:
            (bytes that are alive between forward and backward, largest number of bytes alive at any time).
        """
        decoder = self._decoder
        config: Any = decoder.config
        with _registered(_attention(plan, checkpointing)), torch.device("meta"):
            copies = [copy.deepcopy(self._layers[index]) for _ in range(num_layers)]
            setattr(decoder, self._layers_name, torch.nn.ModuleList(copies))
            config.num_hidden_layers = num_layers
            if self._layer_types[0] is not None:
                config.layer_types = [self._layer_types[index]] * num_layers
            if checkpointing:
                with warnings.catch_warnings(action="ignore"):  # newer versions deprecate the argument that all accept
                    self._model.gradient_checkpointing_enable({"use_reentrant": False})
            chunked_mlp.attach(decoder, replace(plan, tiled_mlp=chunked_mlps))
            for weight in decoder.parameters():  # ZeRO reduces each gradient as soon as it is computed
                weight.register_post_accumulate_grad_hook(_free_gradient)
            embeddings = torch.empty(1, tokens, config.hidden_size, dtype=self._dtype, requires_grad=True)
            with PeakStorages() as storages:
                out = decoder(inputs_embeds=embeddings, position_ids=torch.arange(tokens)[None]).last_hidden_state
                saved = storages.live_bytes()
                out.backward(torch.empty_like(out))
        return saved, storages.peak_bytes


def _free_gradient(weight: torch.Tensor) -> None:
    weight.grad = None


@contextmanager
def _registered(attention: AttentionFunction) -> Iterator[None]:
    """Register ``attention`` under :data:`ATTENTION_NAME`; transformers makes no mask for a name without a mask function."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(ATTENTION_NAME, None)


def _not_called(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """For the construction of a model, which only looks up the name."""
    raise NotImplementedError


def _attention(plan: Plan, checkpointing: bool) -> AttentionFunction:
    """An attention function that allocates and saves what ds_cp's attention does.

    Under checkpointing without ``recompute_attention`` the first run of a layer saves the output, and the recomputation
    takes it from there.
    """
    saved_outputs: dict[torch.nn.Module, torch.Tensor] = {}

    def attend(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        saved_output = saved_outputs.pop(module, None)
        out: torch.Tensor = _Attention.apply(query, key, value, saved_output, plan)  # type: ignore[no-untyped-call]  # torch does not annotate apply
        if checkpointing and saved_output is None and not plan.recompute_attention:
            saved_outputs[module] = out.detach()
        return out.transpose(1, 2), None

    return attend


class _Attention(torch.autograd.Function):
    """Allocates what :mod:`ds_cp.attention.attend` does: exchanged tensors, sums in fp32, and what is saved for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        saved_output: torch.Tensor | None,
        plan: Plan,
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        ctx.plan = plan
        lse = query.new_empty((batch, heads, length), dtype=torch.float32)
        if saved_output is None:
            exchanged = _exchange_buffers(plan, query, key, value)
            accumulated = query.new_empty((batch, length, heads, value.size(-1)), dtype=torch.float32)
            out = accumulated.to(query.dtype).transpose(1, 2)
            del exchanged, accumulated
        else:
            out = saved_output
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        exchanged = _exchange_buffers(ctx.plan, query, key, value, grad, grad)
        accumulated = [x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
        returned = [x.new_empty(x.shape, dtype=torch.float32) for x in (key, value) * 3 if ctx.plan.ring > 1]
        del exchanged, returned
        return *(x.to(query.dtype) for x in accumulated), None, None


def _exchange_buffers(plan: Plan, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Buffers of the exchange: all tensors before and after the all-to-all (ulysses), and K and V of the steps of the ring
    that are in memory at a time.

    Args:
        plan: Plan of the model.
        tensors: Tensors that the all-to-all exchanges; K and V are the second and the third.
    """
    key, value = tensors[1:3]
    by_heads = [x.new_empty(x.shape) for x in tensors * 2 if plan.ulysses > 1]
    return by_heads + [x.new_empty(x.shape) for x in (key, value) * (2 + plan.prefetch_steps) if plan.ring > 1]
