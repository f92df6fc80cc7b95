"""Which models, adapters and calls are refused, and why.

Before anything is changed, in this order:

1. :func:`refuse_adapters`: PEFT adapters that count tokens or prepend cached keys.
2. :func:`check_model`: for each stack of the model, the checks in :data:`STACK_CHECKS` (one function per reason); then
   whether the model types are in the table of types that were compared with one process. All reasons are listed at once.

Before each forward pass: :func:`refuse_call`.

Other modules refuse what they alone can see: :mod:`ds_cp.planner` numbers of heads and kernels, :mod:`.memory.chunked_layers`
models that "offload_kv" cannot run, :mod:`ds_cp.patches.deepspeed` DeepSpeed's features, :mod:`.batch` and :mod:`.bounds` a
batch's shapes and indices, :mod:`.masks` masks, and :mod:`.attention` the arguments of attention.
"""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import torch
from transformers import PreTrainedModel

from ds_cp.agreement import BatchError
from ds_cp.config import KEY, ConfigError
from ds_cp.patches.transformers import neftune, structure, verified
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.transformers.models import layer_kinds, relative_bias, rope
from ds_cp.planner import ModelFacts

TABLE = Path(__file__).with_name("verified.csv")


def _read_table() -> dict[str, tuple[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {line["type"]: (line["verdict"], line["detail"]) for line in csv.DictReader(file)}


COMPARED = _read_table()
"""Result of the comparison of all causal LM types with one process: (verdict, detail) by model type."""

VERIFIED = verified.TYPES | {name for name, (verdict, _) in COMPARED.items() if verdict == "exact"}
"""Model types whose loss and gradients equal those of one process."""


def check_model(model: PreTrainedModel, unverified: str) -> ModelFacts:
    """Run every check that needs no batch, and return what the planner needs to know of the model.

    Args:
        unverified: ``"allow"`` to accept model types that are not in the table.

    Raises:
        ConfigError: The model would train wrong. Lists all reasons.
    """
    stacks = [(stack, structure.stack_config(model, stack)) for stack in structure.find_stacks(model)]
    reasons = [reason for stack, config in stacks for check in STACK_CHECKS for reason in check(stack, config)]
    if unverified != "allow":
        model_types = [*(config.model_type for _, config in stacks), model.config.model_type]
        reasons += _unverified_types(model_types, has_other_reasons=bool(reasons))
    if reasons:
        listed = "\n".join(f"- {reason}" for reason in dict.fromkeys(reasons))
        raise ConfigError(f"{type(model).__name__} cannot be shared exactly:\n{listed}\nNothing was started.")
    return structure.model_facts(model, [config for _, config in stacks])


def refuse_call(decoder: torch.nn.Module, arguments: Mapping[str, Any], call: TaskHeadCall) -> None:
    """Refuse a call that asks for something that no shard contains.

    Raises:
        BatchError: Names it.
    """
    attentions = arguments.get("output_attentions")
    if attentions or (attentions is None and getattr(decoder.config, "output_attentions", False)):
        raise BatchError("output_attentions asks for the S x S matrix that no rank holds; leave it out.")
    if type(decoder).__name__ == "T5GemmaEncoder" and arguments.get("attention_mask") is None:
        raise BatchError(
            "T5Gemma's encoder got no attention_mask: it would hide padding from itself but show it to the decoder, and the "
            "output of padding tokens, which see no key, is undefined. Pass the mask, of ones where there is no padding."
        )
    embedding: Any = decoder.get_input_embeddings() if isinstance(decoder, PreTrainedModel) else None
    has_noise = getattr(embedding, "neftune_noise_alpha", None) and embedding.training
    if has_noise and not neftune.is_patched(embedding):
        raise BatchError(
            "NEFTune scales its noise by the length that it sees, and inside the shared part it sees a shard: the noise would "
            "be larger than you asked for. Use Trainer's neftune_noise_alpha, which ds_cp knows, or leave it out."
        )


# ---- 1. adapters -------------------------------------------------------------------------------------------------

CACHED_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of PEFT adapters whose virtual tokens reach the model as a KV cache."""


def refuse_adapters(model: torch.nn.Module) -> None:
    """Refuse PEFT adapters that count tokens or prepend cached keys.

    Raises:
        ConfigError: Names the adapter and its setting.
    """
    adapters: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    for name, adapter in adapters.items():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise ConfigError(
                f'adapter "{name}" is activated from its invocation tokens on (alora_invocation_tokens): each rank would count '
                "from its own shard's first token. Use LoRA without them. Nothing was started."
            )
        if getattr(adapter, "is_prompt_learning", False) and adapter.peft_type in CACHED_PROMPTS:
            raise ConfigError(
                f'adapter "{name}" is a prefix that PEFT passes as a cache of keys and values ({adapter.peft_type.value}): '
                "a call with a cache is replicated on every rank, so nothing would be shared and long sequences would not fit. "
                "Use prompt tuning or p-tuning, whose virtual tokens are part of the sequence, or LoRA. Nothing was started."
            )


# ---- 2. stacks: each check yields the reasons to refuse a stack --------------------------------------------------


def _takes_no_tokens(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    if {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(stack.forward).parameters):
        yield (
            f"its {type(stack).__name__} takes {getattr(stack, 'main_input_name', 'no tokens')}, which is no sequence of tokens "
            "that ds_cp could cut."
        )


def _has_unknown_recurrence(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    if unknown := layer_kinds.unknown_recurrent(stack):
        yield (
            f"a state, or neighbouring tokens, pass from token to token in {layer_kinds.abbreviate(unknown)} in a way that ds_cp does not "
            "know: each rank would start from an empty state at its own shard."
        )


def _attends_outside_the_interface(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    outside = layer_kinds.without_interface(stack)
    if outside:
        yield (
            f"attention is computed outside of transformers' attention interface in {layer_kinds.abbreviate(outside)}: each rank would "
            "attend to its own shard only."
        )
    has_heads = any(map(structure.head_counts, structure.layer_configs(config)))
    uses_interface = layer_kinds.uses_interface(stack) and has_heads
    if not outside and not uses_interface and not layer_kinds.recurrent(stack):
        yield "none of its layers attends through transformers' attention interface, so no rank would see another's tokens."


def _pools_a_shard(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    pooler = getattr(stack, "pooler", None)
    if pooler is not None and not type(pooler).__name__.endswith("Pooler"):
        yield (
            f"its pooler, a {type(pooler).__name__}, gets the first token from inside of the shared part, and most ranks' first "
            "token is another one. Build it with add_pooling_layer=False, and pool what it returns."
        )


def _has_several_ids_per_token(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    tables = getattr(stack, "embed_tokens", None)
    if isinstance(tables, torch.nn.ModuleList):
        yield (
            f"its ids come in {len(tables)} rows per sequence, one for each table of embed_tokens: each row would be taken for "
            "a sequence of its own."
        )


def _attends_to_another_models_keys(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    if 0 < getattr(config, "num_hidden_layers", 0) <= getattr(config, "num_kv_shared_layers", 0):
        yield (
            f"its {config.num_hidden_layers} layers attend to the keys of another model (num_kv_shared_layers = "
            f"{config.num_kv_shared_layers}), which no rank would cut as it cuts this model's tokens."
        )


ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"})
"""Further layer types of models with recurrent layers. The classes of their modules tell which of them mix tokens."""
SPARSE_LAYER_TYPES = frozenset(
    {"indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention", "heavily_compressed_attention"}
)
"""Types of layers whose keys an indexer selects, or a compressor pools."""


def _has_unknown_layer_type(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None) or ()
    known = ATTENTION_LAYER_TYPES
    if layer_kinds.has_indexer(stack):
        known |= SPARSE_LAYER_TYPES
    if layer_kinds.recurrent(stack):
        known |= RECURRENT_LAYER_TYPES
    for layer_type in sorted(set(layer_types) - known):
        named = layer_kinds.abbreviate(layer_kinds.of_layer_type(stack, layer_types, layer_type))
        yield f'tokens mix in a way that is not shared yet in {named}, of kind "{layer_type}": each rank would mix its own only.'


def _rotates_by_length_inside_layers(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    for name in rope.inside_layers(stack):
        yield (
            f"{name} computes rotary embeddings that depend on the sequence length inside a layer: when the layer is "
            "recomputed it would take the length of its own shard, and ranks would rotate differently."
        )


def _drops_layers(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            yield f"{name} would drop other layers on each rank of a group. Set it to 0."


def _has_unknown_bias(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    if getattr(config, "relative_attention_num_buckets", None) and config.model_type not in relative_bias.MODEL_TYPES:
        yield (
            "its relative position bias comes from a table that transformers expands to S x S of the tokens it sees: each "
            "rank would count distances inside its own shard, and the table's gradient would miss the rest."
        )
    if biased := layer_kinds.with_own_bias(stack):
        yield (
            f"a bias is computed from each query and its distance to each key in {layer_kinds.abbreviate(biased)}, as an S x S tensor of "
            "the tokens that it sees: each rank would count distances inside its own shard."
        )


def _has_unknown_indexer(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    for name in ("index_topk", "index_topk_blocks"):  # number of keys, or of blocks of keys, that each query selects
        if getattr(config, name, None) and not layer_kinds.has_indexer(stack):
            yield (
                f"its layers choose the keys of each query by an index ({name} = {getattr(config, name)}); under another "
                "attention they would silently attend to all keys, and each rank would choose among its own."
            )


def _returns_attentions(stack: torch.nn.Module, config: Any) -> Iterator[str]:
    if getattr(config, "output_attentions", False):
        yield "output_attentions would need the S x S matrix that no rank holds."


STACK_CHECKS: tuple[Callable[[torch.nn.Module, Any], Iterator[str]], ...] = (
    _takes_no_tokens,
    _has_unknown_recurrence,
    _attends_outside_the_interface,
    _pools_a_shard,
    _has_several_ids_per_token,
    _attends_to_another_models_keys,
    _has_unknown_layer_type,
    _rotates_by_length_inside_layers,
    _drops_layers,
    _has_unknown_bias,
    _has_unknown_indexer,
    _returns_attentions,
)
"""Called with a stack and its config."""


# ---- 3. the table of model types ---------------------------------------------------------------------------------


def _unverified_types(model_types: list[str], has_other_reasons: bool) -> Iterator[str]:
    advice = f' "{KEY}.unverified": "allow" runs it all the same; "ds_cp verify" compares it with one process first.'
    for name in dict.fromkeys(model_types):
        if name not in VERIFIED:
            yield (
                f'model type "{name}" is not in the tested table of exact types: {_comparison_of(name)}. It '
                "would train wrong silently where its layers mix tokens outside the attention interface."
                + ("" if has_other_reasons else advice)  # nothing allows what the other checks refuse
            )


def _comparison_of(model_type: str) -> str:
    verdict, detail = COMPARED.get(model_type, ("unknown", ""))
    return {
        "wrong": f"when it was shared it differed from one process ({detail})",
        "refused": f"it was refused ({detail})",
    }.get(verdict, "it was not compared")
