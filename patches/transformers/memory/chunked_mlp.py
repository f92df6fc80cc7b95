"""MLPs of decoder layers, run on chunks of this rank's tokens ("tiled_mlp").

DeepSpeed's TiledMLP gathers a ZeRO-3 weight once per chunk, so that data-parallel ranks whose sequences differ in length issue
different numbers of collectives. Here an MLP is one ZeRO-3 leaf: its weights are gathered once per call.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ds_cp.chunked.module import run_in_chunks
from ds_cp.patches.transformers.memory.leaf_modules import bind_leaves
from ds_cp.planner import Plan

LARGE_BYTES = 256 << 20
"""Size of an intermediate activation above which "auto" runs an MLP in chunks."""

CHUNK_BYTES = 32 << 20
"""Maximum size of the intermediate activation of a chunk on a CPU."""

DEVICE_FACTOR = 8
"""How much larger chunks are elsewhere, some ten thousand tokens: each chunk adds to the fp32 gradient sums of all weights, which
at the sizes of an 8B model moves 0.6 GB per chunk and weight. Not measured on a GPU."""

ATTRIBUTES = frozenset({"mlp", "feed_forward", "ffn"})
"""Names of MLPs in their layers."""

PROJECTIONS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"up_proj", "down_proj"},
    {"fc1", "fc2"},
    {"c_fc", "c_proj"},
    {"dense_h_to_4h", "dense_4h_to_h"},
)
"""The submodules with weights of a plain MLP. One with more (a router, experts, norms) does not run in chunks."""


def attach(stack: nn.Module, plan: Plan) -> Callable[[], None]:
    """Bind the forwards of a stack's MLPs; returns what undoes it.

    Args:
        plan: Its ``tiled_mlp`` is True, False, or None for "if an intermediate activation is large". With ``offload_kv``, layers
            run on chunks of so many tokens already, and an MLP that gets no more tokens than these runs on all of them.
    """
    forward = partial(_forward, plan.tiled_mlp is True, plan.offload_kv)
    return bind_leaves([] if plan.tiled_mlp is False else _mlps(stack), forward)


def _mlps(stack: nn.Module) -> Iterator[nn.Module]:
    for name, module in stack.named_modules():
        if name.rpartition(".")[2] in ATTRIBUTES and _is_plain_mlp(module):
            yield module


def _is_plain_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP of transformers that acts on each token by itself and draws no random numbers."""
    cls = type(module)
    if not cls.__module__.startswith("transformers.models.") or "forward" in vars(module):
        return False
    with_weights = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    has_dropout = "dropout" in cls.forward.__code__.co_names or any(isinstance(m, nn.Dropout) for m in module.modules())
    return with_weights in PROJECTIONS and not has_dropout and _intermediate_size(module) > 0


def _intermediate_size(module: nn.Module) -> int:
    """Width of the intermediate activation. Read from attributes, because ZeRO-3 leaves weights empty."""
    return max((getattr(child, "out_features", 0) for child in module.children()), default=0)


def _forward(always: bool, layer_chunk: int, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an MLP: in chunks if it gets many tokens.

    Args:
        always: Whether to run in chunks even if the intermediate activation is not large.
        layer_chunk: Number of tokens up to which the MLP runs on all of them.
    """
    original = MethodType(type(self).forward, self)
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].size(-2) <= layer_chunk:
        return original(*args, **kwargs)
    bytes_per_token = _intermediate_size(self) * args[0].element_size()
    is_large = args[0].shape[:-1].numel() * bytes_per_token > LARGE_BYTES
    if not (always or is_large) or _differs_when_run_again(self):
        return original(*args)
    chunk_bytes = CHUNK_BYTES * (1 if args[0].device.type == "cpu" else DEVICE_FACTOR)
    return _run_in_chunks(self, original, args[0], max(1, chunk_bytes // bytes_per_token))


def _differs_when_run_again(module: nn.Module) -> bool:
    """Whether the second run of a chunk, in the backward pass, would draw other random numbers or call hooks on parameters.

    Adapters with dropout may have been added after :func:`attach`.
    """
    return _has_dropout(module) or any(parameter._backward_hooks for parameter in module.parameters())


def _has_dropout(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Dropout) and child.p for child in module.modules())


@torch.compiler.disable
def _run_in_chunks(
    module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunk_tokens: int
) -> torch.Tensor:
    ones = (1,) * (x.dim() - 2)  # a chunk [n, H] has as many dims as x: Moshi's MLP unpacks a shape of three

    def run_chunk(chunk: torch.Tensor) -> torch.Tensor:
        return run(chunk.view(*ones, *chunk.shape)).flatten(0, -2)

    return run_in_chunks(module, run_chunk, x, chunk_tokens)
