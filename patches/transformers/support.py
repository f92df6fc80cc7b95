"""Which models can be shared exactly, and the sentence for those that cannot: checked before anything is changed."""

from __future__ import annotations

from typing import Any, Iterator

import torch
from transformers import PreTrainedModel

from ds_cp.config import KEY, ConfigError
from ds_cp.planner import ModelFacts

VERIFIED = frozenset({"gpt2", "llama", "mistral", "olmo2", "qwen2", "qwen3"})
"""Model types whose loss and gradients the tests compare with one process."""

HANDLED_LAYERS = frozenset({"full_attention", "sliding_attention"})

DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def find_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers such as PEFT's.

    Raises:
        ConfigError: there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(
        f'"{KEY}" shares the sequences of transformers models, but {type(model).__name__} holds none: its attention would '
        "see its own shard only. Take the key out, or wrap a PreTrainedModel. Nothing was started."
    )


def examine(model: PreTrainedModel, decoder: torch.nn.Module, unverified: str) -> ModelFacts:
    """The facts that the planner needs, after every check that needs no batch.

    Raises:
        ConfigError: the model, a layer kind or a setting would train wrong; names it and says why.
    """
    config = model.config.get_text_config(decoder=True)
    problems = [*_problems(model, decoder, config)]
    if config.model_type not in VERIFIED and unverified == "refuse":
        problems.append(
            f'model type "{config.model_type}" is not in the tested table ({", ".join(sorted(VERIFIED))}). If its layers '
            f'mix tokens outside the attention interface, it would train wrong silently. Set "{KEY}.unverified": "allow" '
            "to run it all the same, and compare its first step with one process."
        )
    if problems:
        name = type(model).__name__
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"{name} cannot be shared exactly:\n{listed}\nNothing was started.")
    query_heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or query_heads
    return ModelFacts(type(model).__name__, ((query_heads, key_heads),))


def attention_layers(config: Any) -> int:
    """How many attention calls a forward makes."""
    return config.num_hidden_layers


def _problems(model: PreTrainedModel, decoder: torch.nn.Module, config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not handled yet: cross attention would meet a shard of the encoder."
    if not getattr(config, "is_causal", True):
        yield "bidirectional attention (is_causal = false) is not handled yet: tokens would see the past only."
    if not getattr(type(model), "_supports_attention_backend", False):
        yield (
            "its attention does not go through transformers' attention interface, so each rank would attend to its own "
            "shard only."
        )
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - HANDLED_LAYERS):
        yield f'layers of kind "{kind}" are not handled yet: their state would restart on every rank.'
    for rope_type in sorted(_rope_types(config) & {"dynamic", "longrope"}):
        yield (
            f'rotary embedding of type "{rope_type}" reads the sequence length from its own shard, so ranks would rotate '
            "differently."
        )
    if getattr(config, "output_router_logits", False):
        yield "the load-balancing loss of experts (output_router_logits) would see one shard's tokens only."
    for name in DROPOUT_KEYS:
        if getattr(config, name, 0):
            yield (
                f"attention dropout ({name} = {getattr(config, name):g}) is not applied yet: the model would train without "
                f"it. Set it to 0, for example from_pretrained(..., {name}=0.0)."
            )
    if getattr(config, "output_attentions", False):
        yield "output_attentions would need the S x S matrix that no rank holds."


def _rope_types(config: Any) -> set[str]:
    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.update(str(node[name]) for name in ("rope_type", "type") if node.get(name))
            for value in node.values():
                walk(value)

    walk(getattr(config, "rope_scaling", None))
    walk(getattr(config, "rope_parameters", None))
    return found
