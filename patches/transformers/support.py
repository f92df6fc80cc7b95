"""Which models can be shared exactly, and the sentence for those that cannot: checked before anything is changed."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from transformers import PreTrainedModel

from ds_cp.agreement import BatchError
from ds_cp.config import KEY, ConfigError
from ds_cp.patches.transformers import neftune, structure, verified
from ds_cp.patches.transformers.losses.task_head_call import TaskHeadCall
from ds_cp.patches.transformers.models import layer_kinds, relative_bias, rope
from ds_cp.planner import ModelFacts

TABLE = Path(__file__).with_name("verified.csv")


def _table() -> dict[str, tuple[str, str]]:
    """What the sweep over all causal LM types found: (verdict, detail) by model type."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {line["type"]: (line["verdict"], line["detail"]) for line in csv.DictReader(file)}


COMPARED = _table()
VERIFIED = verified.TYPES | {name for name, (verdict, _) in COMPARED.items() if verdict == "exact"}
"""Model types whose loss and gradients equal one process."""

HANDLED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"})
"""Kinds of layers that models with recurrent layers have besides; which of their modules mix tokens is told by class."""

INDEXED_LAYERS = frozenset(
    {"indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention", "heavily_compressed_attention"}
)
"""Kinds of layers whose keys an indexer chooses, or a compressor pools."""

SPARSE_KEYS = ("index_topk", "index_topk_blocks")
"""How configs spell the number of keys, or blocks of keys, that an indexer chooses per query."""


def check_model(model: PreTrainedModel, decoder: torch.nn.Module, unverified: str) -> ModelFacts:
    """The facts that the planner needs, after every check that needs no batch.

    Raises:
        ConfigError: the model, a layer kind or a setting would train wrong; names it and says why.
    """
    stacks = [(stack, structure.stack_config(model, stack)) for stack in structure.find_stacks(model)]
    problems = [*dict.fromkeys(problem for stack, config in stacks for problem in _problems(model, stack, config))]
    types = dict.fromkeys([*(config.model_type for _, config in stacks), model.config.model_type])
    for unknown in () if unverified == "allow" else [name for name in types if name not in VERIFIED]:
        problems.append(
            f'model type "{unknown}" is not in the tested table of exact types: {_found(unknown)}. It '
            f'would train wrong silently where its layers mix tokens outside the attention interface. "{KEY}.unverified": '
            '"allow" runs it all the same; "ds_cp verify" compares it with one process first.'
        )
    if problems:
        name = type(model).__name__
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"{name} cannot be shared exactly:\n{listed}\nNothing was started.")
    return structure.model_facts(model, [config for _, config in stacks])


def refuse_call(decoder: torch.nn.Module, arguments: Mapping[str, Any], call: TaskHeadCall) -> None:
    """Raise for what a single call asks for and a shard cannot give.

    Raises:
        BatchError: names it.
    """
    attentions = arguments.get("output_attentions")
    if attentions or (attentions is None and getattr(decoder.config, "output_attentions", False)):
        raise BatchError("output_attentions asks for the S x S matrix that no rank holds; leave it out.")
    if type(decoder).__name__ == "T5GemmaEncoder" and arguments.get("attention_mask") is None:
        raise BatchError(
            "T5Gemma's encoder got no attention_mask: it would hide padding from itself but show it to the decoder, and what "
            "tokens of padding hold that see no key is not defined. Pass the mask, of ones where there is no padding."
        )
    embedding = decoder.get_input_embeddings() if isinstance(decoder, PreTrainedModel) else None
    noisy = getattr(embedding, "neftune_noise_alpha", None) and embedding.training
    if noisy and not neftune.is_patched(embedding):
        raise BatchError(
            "NEFTune scales its noise by the length that it sees, and inside the shared part it sees a shard: the noise would "
            "be larger than you asked for. Use Trainer's neftune_noise_alpha, which ds_cp knows, or leave it out."
        )


def _found(model_type: str) -> str:
    verdict, detail = COMPARED.get(model_type, ("unknown", ""))
    return {
        "wrong": f"when it was shared it differed from one process ({detail})",
        "refused": f"it was refused ({detail})",
        "not built": "it was not compared",
    }.get(verdict, "it was not compared")


CACHED_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of PEFT adapters whose virtual tokens reach the model as a cache."""


def refuse_adapters(model: torch.nn.Module) -> None:
    """Raise for PEFT adapters that count tokens.

    Raises:
        ConfigError: names the adapter's setting.
    """
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise ConfigError(
                f'adapter "{name}" is activated from its invocation tokens on (alora_invocation_tokens): each rank would count '
                "from its own shard's first token. Use LoRA without them. Nothing was started."
            )
        if getattr(adapter, "is_prompt_learning", False) and adapter.peft_type in CACHED_PROMPTS:
            raise ConfigError(
                f'adapter "{name}" is a prefix that PEFT hands over as a cache of keys and values ({adapter.peft_type.value}): '
                "a call with a cache runs whole on every rank, so nothing would be shared and long sequences would not fit. "
                "Use prompt tuning or p-tuning, whose virtual tokens are part of the sequence, or LoRA. Nothing was started."
            )


def _problems(model: PreTrainedModel, decoder: torch.nn.Module, config: Any) -> Iterator[str]:
    if {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(decoder.forward).parameters):
        yield (
            f"its {type(decoder).__name__} takes {getattr(decoder, 'main_input_name', 'no tokens')}, which is no sequence of tokens "
            "that ds_cp could cut."
        )
    recurrent, unknown = layer_kinds.recurrent(decoder), layer_kinds.unknown_recurrent(decoder)
    if unknown:
        yield (
            f"a state, or neighbouring tokens, pass from token to token in {layer_kinds.abbreviate(unknown)} in a way that ds_cp does not "
            "know: each rank would start from nothing at its own shard."
        )
    alone = layer_kinds.without_interface(decoder)
    if alone:
        yield (
            f"attention is computed outside of transformers' attention interface in {layer_kinds.abbreviate(alone)}: each rank would "
            "attend to its own shard only."
        )
    if (
        not recurrent
        and not alone
        and not (
            layer_kinds.uses_interface(decoder) and any(map(structure.head_counts, structure.layer_configs(config)))
        )
    ):
        yield "none of its layers attends through transformers' attention interface, so no rank would see another's tokens."
    if (pooler := getattr(decoder, "pooler", None)) is not None and not type(pooler).__name__.endswith("Pooler"):
        yield (
            f"its pooler, a {type(pooler).__name__}, gets the first token from inside of the shared part, and most ranks' first "
            "token is another one. Build it with add_pooling_layer=False, and pool what it returns."
        )
    if isinstance(tables := getattr(decoder, "embed_tokens", None), torch.nn.ModuleList):
        yield (
            f"its ids come in {len(tables)} rows per sequence, one for each table of embed_tokens: each row would be taken for "
            "a sequence of its own."
        )
    if 0 < getattr(config, "num_hidden_layers", 0) <= getattr(config, "num_kv_shared_layers", 0):
        yield (
            f"its {config.num_hidden_layers} layers attend to the keys of another model (num_kv_shared_layers = "
            f"{config.num_kv_shared_layers}), which no rank would cut as it cuts this model's tokens."
        )
    chosen = layer_kinds.has_indexer(decoder)
    handled = HANDLED_LAYERS | (INDEXED_LAYERS if chosen else set()) | (RECURRENT_LAYERS if recurrent else set())
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - handled):
        named = layer_kinds.abbreviate(layer_kinds.of_layer_type(decoder, config.layer_types, kind))
        yield f'tokens mix in a way that is not shared yet in {named}, of kind "{kind}": each rank would mix its own only.'
    for name in rope.inside_layers(decoder):
        yield (
            f"{name} computes rotary embeddings that depend on the sequence length inside a layer: when the layer is "
            "recomputed it would take the length of its own shard, and ranks would rotate differently."
        )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            yield f"{name} would drop other layers on each rank of a group. Set it to 0."
    if getattr(config, "relative_attention_num_buckets", None) and config.model_type not in relative_bias.MODEL_TYPES:
        yield (
            "its relative position bias comes from a table that transformers expands to S x S of the tokens it sees: each "
            "rank would count distances inside its own shard, and the table's gradient would miss the rest."
        )
    if biased := layer_kinds.with_own_bias(decoder):
        yield (
            f"a bias is computed from each query and its distance to each key in {layer_kinds.abbreviate(biased)}, as an S x S tensor of "
            "the tokens that it sees: each rank would count distances inside its own shard."
        )
    for name in SPARSE_KEYS:
        if getattr(config, name, None) and not chosen:
            yield (
                f"its layers choose the keys of each query by an index ({name} = {getattr(config, name)}); under another "
                "attention they would silently attend to all keys, and each rank would choose among its own."
            )
    if getattr(config, "output_attentions", False):
        yield "output_attentions would need the S x S matrix that no rank holds."
