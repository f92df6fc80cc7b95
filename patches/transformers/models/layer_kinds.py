"""What the layers of a decoder do with tokens, read from their classes: which attend through transformers' interface,
which attend by themselves, and which pass a state from token to token."""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ds_cp.patches.transformers.attention import DEPTH_ATTENTION
from ds_cp.patches.transformers.models import registry
from ds_cp.patches.transformers.models.introspection import referenced_names
from ds_cp.patches.transformers.models.recurrent import is_known

ATTENTION = re.compile("Attention|MLA")
RECURRENT = re.compile(
    "causal_conv1d|conv_state|selective_scan|chunk_scan|delta_rule|delta_attention|recurrent_state|rnn_scan|rwkv_linear|mlstm"
)
"""Functions and attributes that a class refers to when it carries a state along the sequence: Mamba, gated delta nets,
short convolutions, RG-LRU, RWKV, xLSTM."""


OWN_BIAS = ("rel_logits_proj", "relative_position_bias")
"""Parts of an attention module that make a bias out of queries and distances."""


def without_interface(decoder: torch.nn.Module) -> list[str]:
    """Attention modules that compute attention by themselves, "layers.0.attn (SomeAttention)"; the innermost of nested ones."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in _own_modules(decoder)
        if _is_attention(module)
        and not _reaches_interface(module)
        and not any(is_known(type(part)) for part in module.modules())
        and not any(_is_attention(inner) for inner in module.modules() if inner is not module)
    ]


def recurrent(decoder: torch.nn.Module) -> list[str]:
    """Modules that pass a state, or neighbours, from token to token."""
    return _outermost(decoder, lambda module: module is not decoder and _is_recurrent(module))


def unknown_recurrent(decoder: torch.nn.Module) -> list[str]:
    """Those in which nothing is shared, and that are no part of one that is."""
    known = {part for module in decoder.modules() if is_known(type(module)) for part in module.modules()}
    around = {module for module in decoder.modules() if not known.isdisjoint(module.modules())}
    return _outermost(decoder, lambda module: _is_recurrent(module) and module not in known | around | {decoder})


def count_token_mixers(decoder: torch.nn.Module) -> int:
    """How many modules mix tokens, as attention or recurrent layers: all of them must come through ds_cp."""
    return sum(is_known(type(module)) or _attends_itself(module) for _, module in _own_modules(decoder))


def with_own_bias(decoder: torch.nn.Module) -> list[str]:
    """Attention modules that compute a bias of their own from queries and distances, in a way that ds_cp does not know."""
    return _outermost(
        decoder,
        lambda module: any(
            part is not None and _role(part) != "bias" for part in (getattr(module, n, None) for n in OWN_BIAS)
        ),
    )


def uses_interface(decoder: torch.nn.Module) -> bool:
    """Whether any module reaches the interface at all."""
    return any(_reaches_interface(module) for _, module in _own_modules(decoder))


def has_indexer(decoder: torch.nn.Module) -> bool:
    """Whether what chooses the keys of its queries is a module that ds_cp hands the keys of the whole sequence."""
    return any(_role(module) in ("indexer", "compressor") for module in decoder.modules())


def of_layer_type(decoder: torch.nn.Module, kinds: Sequence[str], kind: str) -> list[str]:
    """The layers that a config says are of a kind: "layers.3 (SomeDecoderLayer)"."""
    for name, module in _own_modules(decoder):
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(kinds):
            indices = (index for index, other in enumerate(kinds) if other == kind)
            return [f"{name}.{index} ({type(module[index]).__name__})" for index in indices]
    return ["its layers"]


def abbreviate(names: list[str]) -> str:
    """The first of many, and how many more."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _outermost(decoder: torch.nn.Module, wanted: Callable[[torch.nn.Module], Any]) -> list[str]:
    """Names and classes of the modules that are wanted, without those inside of others."""
    found: dict[str, str] = {}
    for name, module in _own_modules(decoder):
        if not any(name.startswith(outer + ".") for outer in found) and wanted(module):
            found[name] = f"{name} ({type(module).__name__})"
    return list(found.values())


def _own_modules(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules but those of models inside, such as phi4_multimodal's towers: they see images, which are not shared."""
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
    return is_known(type(module)) or any(map(RECURRENT.search, referenced_names(type(module))))


def _reaches_interface(module: torch.nn.Module) -> bool:
    return any(map(_attends_itself, module.modules()))


def _attends_itself(module: torch.nn.Module) -> bool:
    if (known := _role(module)) is not None:
        return known == "attention"
    kind = type(module)
    if kind.__name__ in DEPTH_ATTENTION or isinstance(module, PreTrainedModel):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in referenced_names(kind)


def _role(module: Any) -> str | None:
    """What a class is whose method is replaced (:class:`~.replacement.Replacement`)."""
    found = registry.replacement_of(type(module))
    return found and found.role
