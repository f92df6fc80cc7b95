"""What a transformers model is made of: its stacks, heads and layers, read from its modules and configs."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_cp.config import KEY, ConfigError
from ds_cp.mask.rules import CAUSAL, EVERYTHING, Band, ChunkedAttention, Rule
from ds_cp.patches.transformers.models import layer_kinds
from ds_cp.planner import ModelFacts


def find_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers such as PEFT's: the first, with a warning, where there are several.

    Raises:
        ConfigError: there is none.
    """
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if found:
        _warn_of_others(model, found)
        return found[0]
    raise ConfigError(
        f'"{KEY}" shares the sequences of transformers models, but {type(model).__name__} holds none: its attention would '
        "see its own shard only. Take the key out, or wrap a PreTrainedModel. Nothing was started."
    )


def _warn_of_others(model: torch.nn.Module, found: list[PreTrainedModel]) -> None:
    first, seen, apart = found[0], {*found[0].modules()}, []
    for other in found[1:]:
        inside = {*other.modules()}
        if other not in seen and first not in inside:
            apart.append(type(other).__name__)
        seen |= inside
    if apart:
        warnings.warn(
            f"{type(model).__name__} holds several models; only the first, {type(first).__name__}, shares its sequences. "
            f"{layer_kinds.abbreviate(apart)} runs on whole rows on every rank: exactly, but in all their memory. Let your wrapper "
            "hold the model that trains on long rows first, or attach the other by itself with ds_cp.context_parallel.",
            stacklevel=4,
        )


def find_decoder(head: PreTrainedModel) -> PreTrainedModel:
    """The text decoder of a model; the model itself when it has no head."""
    decoder = head.get_decoder()
    if decoder is not head and isinstance(decoder, PreTrainedModel):
        return decoder
    # get_decoder() also answers "itself" where the prefix of a head class names no attribute (llama4), or with whatever
    # is called "decoder" (the linear head of modernbert-decoder)
    return next((child for child in head.children() if isinstance(child, PreTrainedModel)), head)


def find_stacks(head: PreTrainedModel) -> list[PreTrainedModel]:
    """The modules whose layers share a sequence, in the order in which they run: the decoder is the last."""
    decoder = find_decoder(head)
    encoder = head.get_encoder() if getattr(head.config, "is_encoder_decoder", False) else head
    if encoder is head:
        return [decoder]
    return [encoder] if encoder in {*decoder.modules()} else [encoder, decoder]  # a head on the encoder alone


def stack_config(head: PreTrainedModel, stack: torch.nn.Module) -> Any:
    """The config of a stack's layers."""
    if getattr(head.config, "is_encoder_decoder", False):
        return getattr(stack, "config", head.config)  # fsmt's stacks are plain modules
    return head.config.get_text_config(decoder=True)


def model_facts(model: PreTrainedModel, configs: list[Any]) -> ModelFacts:
    """What the planner needs of a model, from the configs of its stacks."""
    per_layer = [layer for config in configs for layer in layer_configs(config)]
    pairs = dict.fromkeys(pair for config in per_layer for pair in head_counts(config))
    dims = {dim for config in per_layer for dim in head_dims(config)}
    return ModelFacts(type(model).__name__, tuple(pairs), tuple(sorted(dims)))


def layer_configs(config: Any) -> list[Any]:
    """A config per layer where layers differ (gemma4), else the one."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def head_counts(config: Any) -> list[tuple[int, int]]:
    """Query and key/value heads as they reach the attention: falcon repeats its own, but for multi-query."""
    sides = [getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")]
    if any(sides):
        return [(count, count) for count in sides if count]
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:
        return []
    if config.model_type == "falcon":
        return [(query_heads, 1 if config.multi_query and not config.new_decoder_architecture else query_heads)]
    return [(query_heads, getattr(config, "num_key_value_heads", None) or query_heads)]


def head_dims(config: Any) -> tuple[int, ...]:
    """The head dims that a layer's config names, or the one that follows from its width; the kernel depends on them."""
    names = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    found = {dim for name in names if isinstance(dim := getattr(config, name, None), int)}
    width, count = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return tuple(sorted(found)) or ((width // count,) if width and count else ())


def attention_layers(config: Any, decoder: bool = True) -> int:
    """How many self attention calls a forward of a stack makes; configs of two stacks count each under its own name."""
    if groups := getattr(config, "num_hidden_groups", None):  # albert's layers share weights, so they are fewer modules
        return min(config.num_hidden_layers, groups) * config.inner_group_num
    if stack := getattr(config, "num_layers_per_stack", None):  # hrm_text runs its two stacks in cycles
        return 2 * stack
    count = getattr(config, "decoder_layers" if decoder else "encoder_layers", None) or config.num_hidden_layers
    return count - len(getattr(config, "cross_attention_layers", None) or ())  # mllama's, which only images use


def count_token_mixers(stack: torch.nn.Module, config: Any, decoder: bool = True) -> int:
    """How many calls of a forward mix tokens: all of them must come through ds_cp."""
    return layer_kinds.count_token_mixers(stack) if layer_kinds.recurrent(stack) else attention_layers(config, decoder)


def layer_rules(config: Any, decoder: bool = True) -> Counter[Rule]:
    """How many layers have which rule, as far as a config tells: an estimate for balance, which exactness ignores."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    whole = CAUSAL if decoder and getattr(config, "is_causal", True) else EVERYTHING
    rules = {"full_attention": whole}
    if window:
        rules["sliding_attention"] = whole & Band(window - 1, window - 1)
    if chunk:
        rules["chunked_attention"] = whole & ChunkedAttention(chunk)
    usual = "sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * attention_layers(config, decoder)
    return Counter(rules.get(kind, whole) for kind in kinds)
