"""Rotary embeddings whose frequencies depend on the length of the sequence: RoPE types "dynamic" and "longrope".

They take the length from the largest position that they see, and a rank sees its own tokens. So inside a region a token with
the largest position of the whole batch is appended, and its angles are dropped from the result.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch

from ds_cp.patches.transformers.ambient import current_region

LENGTH_DEPENDENT = ("dynamic", "longrope")


def attach(decoder: torch.nn.Module) -> Callable[[], None]:
    """Hook the length-dependent rotary embeddings of a decoder; returns what removes the hooks."""
    handles = []
    for _, module in _length_dependent(decoder):
        handles.append(module.register_forward_pre_hook(_append_last_position, with_kwargs=True))
        handles.append(module.register_forward_hook(_drop_last_position))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def inside_layers(decoder: torch.nn.Module) -> list[str]:
    """Names of length-dependent rotary embeddings inside layers. They run again when their layer is recomputed, outside of any
    region."""
    layers = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.ModuleList)]
    return [name for name, _ in _length_dependent(decoder) if any(name.startswith(layer + ".") for layer in layers)]


def _length_dependent(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in decoder.named_modules():
        rope_type: Any = getattr(module, "rope_type", None)
        rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if any(known in str(each) for each in rope_types for known in LENGTH_DEPENDENT):
            yield name, module


@torch.compiler.disable
def _append_last_position(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    region = current_region()
    if region is None or region.last_position is None:
        return None
    by_name = "position_ids" in kwargs
    positions = kwargs["position_ids"] if by_name else args[1]
    last = region.last_position.to(positions).expand(*positions.shape[:-1], 1)
    positions = torch.cat([positions, last], dim=-1)
    if by_name:
        return args, kwargs | {"position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable
def _drop_last_position(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    region = current_region()
    if region is None or region.last_position is None:
        return None
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(angles[..., :-1, :] for angles in output)
