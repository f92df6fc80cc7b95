"""Context parallelism for Hugging Face models under DeepSpeed, configured by one entry of the DeepSpeed JSON.

torch's entry point imports this package during ``import torch``, so this file imports only the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    import torch

    from ds_cp.mesh import Mesh

__version__ = "0.1.0"

__all__ = ["context_parallel", "dp_rank", "dp_size", "traffic"]


def context_parallel(model: "torch.nn.Module", config: Mapping[str, Any]) -> "torch.nn.Module":
    """Attach context parallelism to a transformers model in place, for training loops without a DeepSpeed config.

    All ranks of the world must call this function, in the same order. Afterwards the ranks of a context-parallel group
    call the model with the same full batch and get the same loss, and the *mean* of the gradients over the world is the
    gradient.

    Args:
        model: A transformers model, possibly wrapped by PEFT.
        config: Value of the config entry ``context_parallel``, e.g. ``{"size": 8}``, or a DeepSpeed config that contains
            the entry.

    Returns:
        The same model.

    Raises:
        ds_cp.config.ConfigError: The config entry is invalid, or the model has no exact context-parallel form.
    """
    from ds_cp.config import KEY
    from ds_cp.mesh import choose_device
    from ds_cp.patches.data_parallel import active_config

    requested = active_config(config if KEY in config else {KEY: config})
    if requested is not None:
        from ds_cp.patches.transformers.attach import attach

        choose_device(model)
        attach(model, requested)
    return model


def dp_size(source: "torch.nn.Module | Mapping[str, Any] | str | None" = None) -> int:
    """Number of context-parallel groups, each of which reads its own batches.

    Args:
        source: A model that context parallelism is attached to, or a DeepSpeed config (dict or path). Default: the mesh
            that was built last.

    Raises:
        RuntimeError: No model is attached yet, and ``source`` is not a config.
        ds_cp.config.ConfigError: The config entry is invalid, misspelt or misplaced.
    """
    return _data_parallel(source)[0]


def dp_rank(source: "torch.nn.Module | Mapping[str, Any] | str | None" = None) -> int:
    """Index of this rank's context-parallel group. Pass it, with :func:`dp_size`, to a sampler of your own."""
    return _data_parallel(source)[1]


def traffic(model: "torch.nn.Module | None" = None) -> dict[str, float]:
    """Bytes that this rank sent for attention, averaged over all attention calls so far.

    Args:
        model: A model that context parallelism is attached to. Default: the mesh that was built last.

    Returns:
        ``{"forward_bytes_per_layer": ..., "backward_bytes_per_layer": ...}``; empty before the first step.
    """
    mesh = _mesh(model)
    return mesh.traffic() if mesh else {}


def _data_parallel(source: "torch.nn.Module | Mapping[str, Any] | str | None") -> tuple[int, int]:
    """Number of context-parallel groups, and the index of this rank's."""
    import torch

    if source is None or isinstance(source, torch.nn.Module):
        mesh = _mesh(source)
        if mesh is None:
            raise RuntimeError("no model is attached to ds_cp yet: pass the DeepSpeed config that holds the key")
        return mesh.dp_size, mesh.dp_rank
    from ds_cp.patches import data_parallel

    data_parallel.refuse_unread_key(source)
    size = data_parallel.cp_size_of_config(source)
    return data_parallel.dp_size(size), data_parallel.dp_rank(size)


def _mesh(model: "torch.nn.Module | None") -> "Mesh | None":
    if model is not None:
        from ds_cp.patches.transformers.attach import attachment

        state = attachment(model)
        return state.mesh if state else None
    from ds_cp.mesh import built_meshes

    meshes = built_meshes()
    return meshes[-1] if meshes else None
