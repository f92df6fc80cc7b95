"""Prefill: a long prompt is read on shared tokens, and every rank gets the whole cache; decoding then runs whole on each.

The layers get a stand-in for the empty cache. It hands their own keys back, for attention over them is shared anyway, and
gathers them into the cache that the caller sees.
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
"""Tokens of a prompt from which on it is shared. All ranks of a group must then ask for the same."""

CACHE_NAMES = ("cache", "past_key_values")
"""What stacks and their outputs call a cache; which one depends on transformers' version."""

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold the keys and values of their tokens and nothing else."""


class ShardedPrefillCache(DynamicCache):
    """Stands for an empty cache in one shared forward."""

    def __init__(self, cache: DynamicCache, region: Region):
        super().__init__()
        self.cache, self.region, self.filled = cache, region, 0
        self.layers = cache.layers  # models with loops add to them

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any):
        """Keys and values [B, h, L, d] of a layer: all tokens' go to the cache, the rank's own come back."""
        whole = (self.region.gather(each, dim=2) for each in (key, value))
        self.cache.update(*whole, layer, *args, **kwargs)
        self.filled += 1
        return key, value

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As many keys as queries, none before them."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Nothing was seen before."""
        return 0

    get_seq_length = get_query_offset

    def done(self, layers: int) -> DynamicCache:
        """The cache that the caller gets.

        Raises:
            BatchError: a layer kept its keys elsewhere.
        """
        if self.filled < layers:
            raise BatchError(
                f"{self.filled} of {layers} layers put their keys into the cache while the prompt was shared; decoding would "
                "miss the others. Call the model with use_cache=False."
            )
        return self.cache


class NoCacheError(BatchError, AttributeError):
    """A cache that a shared forward does not have was used; for ``hasattr`` it lacks what a cache has."""


class NoCache:
    """Stands where one process returns a cache and a shared forward has none, so that what comes after it keeps its place."""

    __module__ = "builtins"  # DeepSpeed's hooks warn of outputs whose type comes from elsewhere

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)  # Python's own questions, of copy say
        raise NoCacheError(
            f"cache.{name}: a forward with labels, with gradients or without use_cache=True was shared, and no rank holds the "
            "keys of all tokens; decoding would go on from a shard. Call the model under torch.no_grad with use_cache=True "
            "and without labels."
        )

    def __len__(self):
        return self.get_seq_length()

    def __getitem__(self, index: Any):
        return self.layers[index]


def returns_cache(module: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether one process would return a cache from this call of a decoder."""
    if not getattr(module.config, "is_decoder", True):
        return False
    wanted = arguments.get("use_cache")
    wanted = getattr(module.config, "use_cache", False) if wanted is None else wanted
    checkpointed = getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled()
    return bool(wanted) and not checkpointed


def with_no_cache(output: Any) -> Any:
    """A decoder's output with a stand-in where one process returns its cache: second in a tuple."""
    if isinstance(output, tuple):
        return (output[0], NoCache(), *output[1:])
    name = next(
        (each.name for each in (fields(output) if is_dataclass(output) else ()) if each.name in CACHE_NAMES), None
    )
    return output if name is None or output.get(name) is not None else replace(output, **{name: NoCache()})


def cache_argument(stack: torch.nn.Module) -> str | None:
    """What a stack calls the cache that its layers fill; None where one of them would not, so that prompts run whole."""
    if any(_keeps_its_keys(type(part)) for part in stack.modules()):
        return None
    return next((name for name in CACHE_NAMES if name in inspect.signature(stack.forward).parameters), None)


def _keeps_its_keys(kind: type) -> bool:
    found = registry.replacement_of(kind)
    return found is not None and (found.role, found.method, found.fills_cache) == ("attention", "forward", False)


def cache_to_fill(module: torch.nn.Module, arguments: Mapping[str, Any]) -> DynamicCache | None:
    """The cache to fill, where a call with a cache is a prefill that can be shared; None where it runs whole."""
    mask = batches.mask_of(arguments)
    cache = batches.cache_of(arguments)
    if torch.is_grad_enabled() or any(arguments.get(name) is not None for name in batches.SECOND):
        return None
    if batches.shape_of(arguments)[1] < MIN_PROMPT_TOKENS or not (
        mask is None or isinstance(mask, torch.Tensor) and mask.dim() == 2
    ):
        return None
    cache = DynamicCache(config=module.config) if cache is None else cache
    plain = (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(each) in PLAIN_LAYERS for each in cache.layers)
    )
    shared = getattr(module.config, "num_kv_shared_layers", 0)  # layers that read what another one put into the cache
    return cache if plain and not shared and cache.get_seq_length() == 0 else None
