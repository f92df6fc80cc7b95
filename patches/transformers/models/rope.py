"""Rotary embeddings that choose their frequencies by the sequence length ("dynamic", "longrope").

They take the length from the largest position that they see. Each rank sees its own tokens, so inside a region one more
token with the whole batch's largest position is appended, and its angles are dropped again.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch

from ds_cp.patches.transformers.ambient import current_region

BY_LENGTH = ("dynamic", "longrope")


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Hook every such module of a decoder; returns what undoes it."""
    handles = []
    for _, module in _by_length(decoder):
        handles.append(module.register_forward_pre_hook(_append, with_kwargs=True))
        handles.append(module.register_forward_hook(_drop))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def inside_layers(decoder: torch.nn.Module) -> list[str]:
    """Names of such modules that run again when their layer is recomputed, outside of any region."""
    layers = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.ModuleList)]
    return [name for name, _ in _by_length(decoder) if any(name.startswith(layer + ".") for layer in layers)]


def _by_length(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in decoder.named_modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(known in str(kind) for kind in kinds for known in BY_LENGTH):
            yield name, module


@torch.compiler.disable
def _append(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    region = current_region()
    if region is None or region.last_position is None:
        return None
    named = "position_ids" in kwargs
    positions = kwargs["position_ids"] if named else args[1]
    last = region.last_position.to(positions).expand(*positions.shape[:-1], 1)
    positions = torch.cat([positions, last], dim=-1)
    if named:
        return args, kwargs | {"position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable
def _drop(module: torch.nn.Module, args: tuple, output: Any) -> Any:
    region = current_region()
    if region is None or region.last_position is None:
        return None
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(angles[..., :-1, :] for angles in output)
