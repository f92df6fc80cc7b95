"""transformers: attention by name, the border around the decoder, the loss, the Trainer's arithmetic."""

from __future__ import annotations


def install() -> None:
    """Everything that is process-wide; models are attached one by one (:mod:`.border`)."""
    from ds_cp.patches.transformers import attention, trainer

    attention.install()
    trainer.install()
