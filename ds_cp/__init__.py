"""ds_cp: context parallelism for Hugging Face models under DeepSpeed, switched on by one JSON key.

Nothing heavy is imported here: this package is loaded by torch's entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"

__all__ = ["context_parallel", "dp_rank", "dp_size", "traffic"]


def context_parallel(model: "torch.nn.Module", config: Mapping[str, Any]) -> "torch.nn.Module":
    """Share a transformers model's sequences between ranks, in place; the door for people who write their own loop.

    All ranks of the world call this in the same order. From then on the ranks of a group call the model with the same
    full batch, its loss is the group's, and the *mean* of the gradients over the world is the gradient.

    Args:
        model: a transformers model, possibly wrapped by PEFT.
        config: the value of the JSON key, e.g. ``{"size": 8}``, or a whole DeepSpeed config that holds the key.

    Returns:
        The same model.

    Raises:
        ds_cp.config.ConfigError: a wrong key, or a model that cannot be shared exactly.
    """
    from ds_cp import config as key
    from ds_cp.mesh import choose_device
    from ds_cp.patches.data_parallel import active_config

    requested = active_config(config if key.KEY in config else {key.KEY: config})
    if requested is not None:
        from ds_cp.patches.transformers.attach import attach

        choose_device(model)
        attach(model, requested)
    return model


def dp_size(source: "torch.nn.Module | Mapping[str, Any] | str | None" = None) -> int:
    """How many groups read different batches.

    Args:
        source: an attached model, or the DeepSpeed config (dict or path) before there is one; default: the mesh that was
            built last.

    Raises:
        RuntimeError: nothing is known yet.
        ds_cp.config.ConfigError: a wrong key, or one that nobody reads.
    """
    return _data_parallel(source)[0]


def dp_rank(source: "torch.nn.Module | Mapping[str, Any] | str | None" = None) -> int:
    """Which of the groups this rank belongs to; see :func:`dp_size`. Use both for a sampler of your own."""
    return _data_parallel(source)[1]


def traffic(model: "torch.nn.Module | None" = None) -> dict[str, float]:
    """Bytes that this rank sent for attention, averaged over all attention calls so far.

    Args:
        model: an attached model; default: the mesh that was built last.

    Returns:
        ``{"forward_bytes_per_layer": ..., "backward_bytes_per_layer": ...}``; empty before the first step.
    """
    mesh = _mesh(model)
    return mesh.traffic() if mesh else {}


def _data_parallel(source: Any) -> tuple[int, int]:
    import torch

    mesh = _mesh(source if isinstance(source, torch.nn.Module) else None)
    if source is None or isinstance(source, torch.nn.Module):
        if mesh is None:
            raise RuntimeError("no model is attached to ds_cp yet: pass the DeepSpeed config that holds the key")
        return mesh.dp_size, mesh.dp_rank
    from ds_cp.patches import data_parallel

    data_parallel.refuse_unread_key(source)
    size = data_parallel.cp_size_of_config(source)
    return data_parallel.dp_size(size), data_parallel.dp_rank(size)


def _mesh(model: "torch.nn.Module | None") -> Any:
    from ds_cp import mesh as meshes

    if model is not None:
        from ds_cp.patches.transformers.attach import attachment

        state = attachment(model)
        return state.mesh if state else None
    known = meshes.built_meshes()
    return known[-1] if known else None
