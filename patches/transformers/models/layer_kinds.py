"""How the layers of a decoder mix tokens, read from the names that their classes refer to.

A layer attends through transformers' attention interface, attends by itself, or passes a state along the sequence. What
ds_cp can share follows from that: :mod:`~ds_cp.patches.transformers.support` refuses the rest.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ds_cp.patches.transformers.attention import DEPTH_ATTENTION
from ds_cp.patches.transformers.models import registry
from ds_cp.patches.transformers.models.introspection import referenced_names
from ds_cp.patches.transformers.models.recurrent_tables import is_known

ATTENTION = re.compile("Attention|MLA")
RECURRENT = re.compile(
    "causal_conv1d|conv_state|selective_scan|chunk_scan|delta_rule|delta_attention|recurrent_state|rnn_scan|rwkv_linear|mlstm"
)
"""Functions and attributes that a class refers to if it passes a state along the sequence: Mamba, gated delta nets, short
convolutions, RG-LRU, RWKV, xLSTM."""

BIAS_MODULES = ("rel_logits_proj", "relative_position_bias")
"""Submodules of an attention module that compute a bias from queries and distances."""


def without_interface(decoder: torch.nn.Module) -> list[str]:
    """Attention modules that neither call the attention interface nor have a replacement, as "layers.0.attn (SomeAttention)".
    Of nested ones, the innermost."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in _own_modules(decoder)
        if _is_attention(module)
        and not _uses_interface(module)
        and not any(is_known(type(part)) for part in module.modules())
        and not any(_is_attention(inner) for inner in module.modules() if inner is not module)
    ]


def recurrent(decoder: torch.nn.Module) -> list[str]:
    """Modules that pass a state, or neighbouring tokens, along the sequence."""
    return _outermost(decoder, lambda module: module is not decoder and _is_recurrent(module))


def unknown_recurrent(decoder: torch.nn.Module) -> list[str]:
    """Modules that pass a state along the sequence in a way that ds_cp does not know, outside of modules that it knows."""
    known = {part for module in decoder.modules() if is_known(type(module)) for part in module.modules()}
    around = {module for module in decoder.modules() if not known.isdisjoint(module.modules())}
    return _outermost(decoder, lambda module: _is_recurrent(module) and module not in known | around | {decoder})


def count_token_mixers(decoder: torch.nn.Module) -> int:
    """The number of modules that mix tokens, as attention or recurrent layers. All of them must run through ds_cp."""
    return sum(is_known(type(module)) or _attends(module) for _, module in _own_modules(decoder))


def with_own_bias(decoder: torch.nn.Module) -> list[str]:
    """Attention modules that compute a bias from queries and distances in a way that ds_cp does not know."""

    def has_unknown_bias(module: torch.nn.Module) -> bool:
        parts = (getattr(module, name, None) for name in BIAS_MODULES)
        return any(part is not None and _role(part) != "bias" for part in parts)

    return _outermost(decoder, has_unknown_bias)


def uses_interface(decoder: torch.nn.Module) -> bool:
    """Whether any module calls the attention interface, itself or through its replacement."""
    return any(_uses_interface(module) for _, module in _own_modules(decoder))


def has_indexer(decoder: torch.nn.Module) -> bool:
    """Whether any module selects or compresses keys and has a replacement."""
    return any(_role(module) in ("indexer", "compressor") for module in decoder.modules())


def of_layer_type(decoder: torch.nn.Module, layer_types: Sequence[str], layer_type: str) -> list[str]:
    """The layers that a config's ``layer_types`` say are of one type, as "layers.3 (SomeDecoderLayer)"."""
    for name, module in _own_modules(decoder):
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(layer_types):
            indices = (index for index, other in enumerate(layer_types) if other == layer_type)
            return [f"{name}.{index} ({type(module[index]).__name__})" for index in indices]
    return ["its layers"]


def abbreviate(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _outermost(decoder: torch.nn.Module, predicate: Callable[[torch.nn.Module], bool]) -> list[str]:
    """Names and classes of the modules that fulfil a predicate, without modules inside of these."""
    found: dict[str, str] = {}
    for name, module in _own_modules(decoder):
        if not any(name.startswith(outer + ".") for outer in found) and predicate(module):
            found[name] = f"{name} ({type(module).__name__})"
    return list(found.values())


def _own_modules(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules without those of models inside the decoder: phi4_multimodal's towers see images, which are not shared."""
    models: list[str] = []
    for name, module in decoder.named_modules():
        if any(name.startswith(model + ".") for model in models):
            continue
        if isinstance(module, PreTrainedModel) and module is not decoder:
            models.append(name)
        else:
            yield name, module


def _is_attention(module: torch.nn.Module) -> bool:
    name = type(module).__name__
    return ATTENTION.search(name) is not None and name not in DEPTH_ATTENTION


def _is_recurrent(module: torch.nn.Module) -> bool:
    return is_known(type(module)) or any(map(RECURRENT.search, _referenced_names(module)))


def _uses_interface(module: torch.nn.Module) -> bool:
    return any(map(_attends, module.modules()))


def _attends(module: torch.nn.Module) -> bool:
    """Whether a module itself calls the attention interface, or its replacement does."""
    role = _role(module)
    if role is not None:
        return role == "attention"
    if type(module).__name__ in DEPTH_ATTENTION or isinstance(module, PreTrainedModel):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in _referenced_names(module)


def _referenced_names(module: Any) -> frozenset[str]:
    cls: type = type(module)
    return referenced_names(cls)


def _role(module: Any) -> str | None:
    """The role of a class with a replacement (:class:`~.replacement.Replacement`); None if it has none."""
    found = registry.replacement_of(type(module))
    return found and found.role
