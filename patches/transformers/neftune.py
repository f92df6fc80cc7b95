"""NEFTune: scales the noise on embeddings by the length of the whole sequence, instead of this rank's tokens."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch

from ds_cp import patches
from ds_cp.patches.transformers.ambient import current_region


def install() -> None:
    """Patch the hook that transformers' ``activate_neftune`` registers on the embedding."""
    from transformers.integrations import neftune

    why = "noise by the length of the whole sequence"
    patches.replace(neftune, "neftune_post_forward_hook", _scale_by_sequence_length, why, "neftune_noise_alpha")
    patches.require(neftune, "activate_neftune", why, "neftune_post_forward_hook")


def is_patched(embedding: torch.nn.Module) -> bool:
    """Whether the noise of this embedding comes from the patched hook."""
    return any(getattr(hook, "ds_cp", False) for hook in embedding._forward_hooks.values())


def _scale_by_sequence_length(original: Callable) -> Callable:
    """Uniform noise of magnitude alpha / sqrt(S d) (Jain et al. 2023). Each rank draws the noise of its own tokens."""

    @functools.wraps(original)
    def neftune_post_forward_hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        region = current_region()
        if region is None:
            return original(module, args, output)
        alpha = module.neftune_noise_alpha
        module.neftune_noise_alpha = alpha * math.sqrt(output.size(1) / region.layout.seq_len)
        try:
            return original(module, args, output)
        finally:
            module.neftune_noise_alpha = alpha

    neftune_post_forward_hook.ds_cp = True  # type: ignore[attr-defined]  # the mark that is_patched looks for
    return neftune_post_forward_hook
