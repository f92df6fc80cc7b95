"""Trainer: batch sizes and token counts by data-parallel rank. Its loss and its token normalisation stay as they are."""

from __future__ import annotations

import functools
from typing import Any, Callable

from ds_cp import patches
from ds_cp.patches.deepspeed import active


class _PerGroup:
    """TrainingArguments as seen by batch arithmetic: the world counts groups, not ranks."""

    def __init__(self, args: Any, cp_size: int):
        self._args, self._cp_size = args, cp_size

    @property
    def world_size(self) -> int:
        return self._args.world_size // self._cp_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def cp_size(ds_config: Any) -> int:
    """Ranks per sequence that a DeepSpeed config asks for; 1 without the key."""
    asked = active(ds_config)
    return asked.size if asked else 1


def install() -> None:
    """Patch the config's batch size check, which TrainingArguments calls; the Trainer itself only then, for importing
    it costs a plain loop a second."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    patches.replace(HfTrainerDeepSpeedConfig, "trainer_config_process", _config_process, "batch sizes by dp")


def _install_trainer() -> None:
    """Patch the Trainer's two places that count the world's ranks."""
    from transformers import Trainer

    patches.replace(Trainer, "get_total_train_batch_size", _total_batch_size, "counts each group once")
    patches.replace(Trainer, "_track_num_input_tokens", _tokens_seen, "counts each group once")


def _config_process(original: Callable) -> Callable:
    @functools.wraps(original)
    def trainer_config_process(self, args, *rest, **kwargs):
        _install_trainer()
        return original(self, _PerGroup(args, cp_size(self.config)), *rest, **kwargs)

    return trainer_config_process


def _total_batch_size(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_total_train_batch_size(self, args):
        return original(self, args) // _size(self)

    return get_total_train_batch_size


def _tokens_seen(original: Callable) -> Callable:
    @functools.wraps(original)
    def _track_num_input_tokens(self, inputs):
        before = self.state.num_input_tokens_seen
        original(self, inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // _size(self)

    return _track_num_input_tokens


def _size(trainer: Any) -> int:
    hf_config = getattr(trainer.args, "hf_deepspeed_config", None)
    return cp_size(hf_config.config) if hf_config is not None else 1
