"""transformers: attention, task heads and losses, and Trainer's batch arithmetic."""

from __future__ import annotations


def install() -> None:
    """Install the patches that affect the whole process. Models are attached one by one (:mod:`.attach`)."""
    from transformers import PreTrainedModel

    from ds_cp import patches

    # attach imports every class and function of transformers that a model needs, so a missing one is reported now
    from ds_cp.patches.transformers import attach, attention, trainer  # noqa: F401
    from ds_cp.patches.transformers.memory import recompute

    why = "checkpointed layers run in the region of their forward"
    patches.require(PreTrainedModel, "_set_gradient_checkpointing", why, recompute.ATTRIBUTE)
    patches.require(PreTrainedModel, "loss_function", "the loss counts a group's tokens", "_loss_function")
    attention.install()
    trainer.install()
