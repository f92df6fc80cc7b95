"""The structure of a transformers model: its stacks, task head and layers, read from its modules and configs.

A stack is a run of layers that share one sequence: the text decoder, or the encoder and the decoder.
"""

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
    """The transformers model inside wrappers such as PEFT's. If there are several: the first, with a warning.

    Raises:
        ConfigError: There is none.
    """
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if found:
        _warn_of_separate_models(model, found)
        return found[0]
    raise ConfigError(
        f'"{KEY}" shares the sequences of transformers models, but {type(model).__name__} holds none: its attention would '
        "see its own shard only. Take the key out, or wrap a PreTrainedModel. Nothing was started."
    )


def _warn_of_separate_models(model: torch.nn.Module, found: list[PreTrainedModel]) -> None:
    first, seen, separate = found[0], {*found[0].modules()}, []
    for other in found[1:]:
        modules = {*other.modules()}
        if other not in seen and first not in modules:
            separate.append(type(other).__name__)
        seen |= modules
    if separate:
        warnings.warn(
            f"{type(model).__name__} holds several models; only the first, {type(first).__name__}, shares its sequences. "
            f"{layer_kinds.abbreviate(separate)} runs on whole rows on every rank, which is exact but needs all their memory. Let your wrapper "
            "hold the model that trains on long rows first, or attach the other by itself with ds_cp.context_parallel.",
            stacklevel=4,
        )


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder of a model; the model itself if it has no task head."""
    decoder = model.get_decoder()
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    # get_decoder() also returns the model itself if its base_model_prefix names no attribute (llama4), or whatever
    # attribute is called "decoder" (the linear LM head of modernbert-decoder).
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def find_stacks(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The modules that run the stacks, in the order in which they run: the decoder is the last."""
    decoder = find_decoder(model)
    encoder = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    if encoder is model:
        return [decoder]
    if encoder in {*decoder.modules()}:  # a task head on the encoder alone
        return [encoder]
    return [encoder, decoder]


def stack_config(model: PreTrainedModel, stack: torch.nn.Module) -> Any:
    """The config of a stack's layers."""
    if getattr(model.config, "is_encoder_decoder", False):
        return getattr(stack, "config", model.config)  # fsmt's stacks are not PreTrainedModels
    return model.config.get_text_config(decoder=True)


def model_facts(model: PreTrainedModel, configs: list[Any]) -> ModelFacts:
    """What the planner needs to know of a model, from the configs of its stacks."""
    per_layer = [layer for config in configs for layer in layer_configs(config)]
    pairs = dict.fromkeys(pair for config in per_layer for pair in head_counts(config))
    dims = {dim for config in per_layer for dim in head_dims(config)}
    return ModelFacts(type(model).__name__, tuple(pairs), tuple(sorted(dims)))


def layer_configs(config: Any) -> list[Any]:
    """One config per layer if layers differ (gemma4), else one for all."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def head_counts(config: Any) -> list[tuple[int, int]]:
    """Distinct numbers of query and key/value heads that layers pass to attention.

    falcon repeats its key/value heads before it, except in multi-query attention.
    """
    encoder_and_decoder = [getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")]
    if any(encoder_and_decoder):
        return [(count, count) for count in encoder_and_decoder if count]
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:
        return []
    if config.model_type == "falcon":
        return [(query_heads, 1 if config.multi_query and not config.new_decoder_architecture else query_heads)]
    return [(query_heads, getattr(config, "num_key_value_heads", None) or query_heads)]


def head_dims(config: Any) -> tuple[int, ...]:
    """The head dims that a layer's config names, or else hidden size / heads. The choice of a kernel depends on them."""
    names = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    named = {dim for name in names if isinstance(dim := getattr(config, name, None), int)}
    hidden_size, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return tuple(sorted(named)) or ((hidden_size // heads,) if hidden_size and heads else ())


def attention_layers(config: Any, is_decoder: bool = True) -> int:
    """Number of self-attention calls in a forward pass of a stack.

    Configs of encoder-decoders name the layers of both stacks.
    """
    if groups := getattr(config, "num_hidden_groups", None):  # albert's layers share weights, so modules are fewer
        return min(config.num_hidden_layers, groups) * config.inner_group_num
    if layers := getattr(config, "num_layers_per_stack", None):  # hrm_text runs its two stacks in cycles
        return 2 * layers
    count = getattr(config, "decoder_layers" if is_decoder else "encoder_layers", None) or config.num_hidden_layers
    return count - len(getattr(config, "cross_attention_layers", None) or ())  # mllama's attend to images only


def count_token_mixers(stack: torch.nn.Module, config: Any, is_decoder: bool = True) -> int:
    """Number of calls in a forward pass that mix tokens. All of them must go through ds_cp."""
    return (
        layer_kinds.count_token_mixers(stack) if layer_kinds.recurrent(stack) else attention_layers(config, is_decoder)
    )


def layer_rules(config: Any, is_decoder: bool = True) -> Counter[Rule]:
    """Number of layers per rule, as far as the config tells.

    This is an estimate for the balanced layout. Exactness does not depend on it.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    full = CAUSAL if is_decoder and getattr(config, "is_causal", True) else EVERYTHING
    rules: dict[str, Rule] = {"full_attention": full}
    if window:
        rules["sliding_attention"] = full & Band(window - 1, window - 1)
    if chunk:
        rules["chunked_attention"] = full & ChunkedAttention(chunk)
    default = "sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [default] * attention_layers(config, is_decoder)
    return Counter(rules.get(layer_type, full) for layer_type in layer_types)
