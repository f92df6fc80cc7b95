"""Prefill: a long prompt is processed in a region, and every rank gets the full KV cache. Decoding is then replicated.

In place of the empty cache the layers get a :class:`ShardedPrefillCache`. It returns a layer's own keys and values, because
attention over them is sharded already, and gathers them into the cache that the caller gets.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from typing import Any, Mapping

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ds_cp.agreement import BatchError
from ds_cp.patches.transformers import batch as batches
from ds_cp.patches.transformers.models import registry
from ds_cp.region import Region

MIN_PROMPT_TOKENS = 4096
"""Length of the shortest prompt that is processed in a region. All ranks of a group must then generate from the same
prompt."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in the arguments and outputs of stacks, in different versions of transformers."""

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that store the keys and values of their tokens and nothing else."""


# ---- forwards that fill a cache ----------------------------------------------------------------------------------


def cache_argument(stack: torch.nn.Module) -> str | None:
    """Name of the argument for the cache that a stack's layers fill; None if one of its layers would not fill it."""
    if any(_ignores_cache(type(part)) for part in stack.modules()):
        return None
    return next((name for name in CACHE_NAMES if name in inspect.signature(stack.forward).parameters), None)


def _ignores_cache(cls: type) -> bool:
    """Whether ds_cp replaces the forward of an attention class by one that does not fill the caller's cache."""
    entry = registry.replacement_of(cls)
    return entry is not None and (entry.role, entry.method, entry.fills_cache) == ("attention", "forward", False)


def cache_to_fill(module: torch.nn.Module, arguments: Mapping[str, Any]) -> DynamicCache | None:
    """The cache to fill, if a call with a cache is a prefill that a region can process; None if it is replicated."""
    if torch.is_grad_enabled() or any(arguments.get(name) is not None for name in batches.SECOND_SEQUENCES):
        return None
    mask = batches.mask_of(arguments)
    has_dense_mask = mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2)
    if has_dense_mask or batches.shape_of(arguments)[1] < MIN_PROMPT_TOKENS:
        return None
    config: Any = module.config
    cache = batches.cache_of(arguments)
    cache = DynamicCache(config=config) if cache is None else cache
    is_plain = (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in PLAIN_LAYERS for layer in cache.layers)
    )
    reads_other_layers = getattr(config, "num_kv_shared_layers", 0)  # layers that attend to another layer's cached keys
    return cache if is_plain and not reads_other_layers and cache.get_seq_length() == 0 else None


class ShardedPrefillCache(DynamicCache):
    """Replaces an empty cache during one forward pass in a region.

    Attributes:
        cache: The cache that the caller gets.
        filled: Number of layers that have stored their keys and values.
    """

    def __init__(self, cache: DynamicCache, region: Region):
        super().__init__()
        self.cache, self.region, self.filled = cache, region, 0
        self.layers = cache.layers  # models that loop over their layers add to this list

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values [B, h, L, d] of a layer into the cache; return this rank's."""
        keys, values = (self.region.gather(states, dim=2) for states in (key_states, value_states))
        self.cache.update(keys, values, layer_idx, *args, **kwargs)
        self.filled += 1
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys equals the number of queries, and none precede them."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """No token precedes the prompt."""
        return 0

    get_seq_length = get_query_offset

    def filled_cache(self, layers: int) -> DynamicCache:
        """The cache that the caller gets.

        Args:
            layers: Number of layers that must have stored their keys and values.

        Raises:
            BatchError: A layer has not.
        """
        if self.filled < layers:
            raise BatchError(
                f"{self.filled} of {layers} layers put their keys into the cache while the prompt was shared; decoding would "
                "miss the others. Call the model with use_cache=False."
            )
        return self.cache


# ---- forwards without a cache ------------------------------------------------------------------------------------


class NoCacheError(BatchError, AttributeError):
    """A cache was used that a forward pass in a region has not filled. An AttributeError, so that ``hasattr`` is False."""


class NoCache:
    """Returned where one process returns a cache, so that the outputs after it keep their index. Any use of it raises."""

    __module__ = "builtins"  # DeepSpeed's hooks warn about outputs of other modules' types

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # looked up by Python itself, for example by copy
        raise NoCacheError(
            f"cache.{name}: a forward with labels, with gradients or without use_cache=True was shared, and no rank holds the "
            "keys of all tokens; decoding would go on from a shard. Call the model under torch.no_grad with use_cache=True "
            "and without labels."
        )

    def __len__(self) -> int:
        return self.get_seq_length()

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]


def returns_cache(module: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether one process would return a cache from this call of a decoder."""
    if not getattr(module.config, "is_decoder", True):
        return False
    use_cache = arguments.get("use_cache")
    use_cache = getattr(module.config, "use_cache", False) if use_cache is None else use_cache
    is_checkpointed = getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled()
    return bool(use_cache) and not is_checkpointed


def with_no_cache(output: Any) -> Any:
    """A decoder's output with :class:`NoCache` where one process returns its cache: second in a tuple, or by name."""
    if isinstance(output, tuple):
        return (output[0], NoCache(), *output[1:])
    names = [each.name for each in fields(output)] if is_dataclass(output) else []
    name = next((name for name in names if name in CACHE_NAMES), None)
    return output if name is None or output.get(name) is not None else replace(output, **{name: NoCache()})
