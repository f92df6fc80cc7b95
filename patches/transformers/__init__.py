"""transformers: attention by name, the border around the decoder, the loss, the Trainer's arithmetic."""

from __future__ import annotations


def install() -> None:
    """Everything that is process-wide; models are attached one by one (:mod:`.attach`)."""
    from transformers import PreTrainedModel

    from ds_cp import patches
    from ds_cp.patches.transformers import attach, attention, trainer  # noqa: F401, all names that a model needs
    from ds_cp.patches.transformers.memory import recompute

    why = "checkpointed layers run in the region of their forward"
    patches.require(PreTrainedModel, "_set_gradient_checkpointing", why, recompute.ATTRIBUTE)
    patches.require(PreTrainedModel, "loss_function", "the loss counts a group's tokens", "_loss_function")
    attention.install()
    trainer.install()
