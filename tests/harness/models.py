"""Tiny random models by type name. A new model type is one new line in ``data/models.py``."""

import copy
import inspect
import sys
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from data.models import TYPES
from ds_cp.cli.shrink import tiny_config

HEAD_DIM = 8
VOCAB = 128


class Fixed(dict):
    """A hashable dict, as the value of an override."""

    def __hash__(self):
        return hash(tuple(sorted(self.items())))


@dataclass(frozen=True)
class ModelSpec:
    """Hashable description of a model, so that results of the oracle can be cached."""

    type: str = "llama"
    heads: int = 8
    kv_heads: int = 2
    layers: int = 2
    seed: int = 0
    overrides: tuple = ()  # pairs (config key, value)
    score_offset: float = 0.0  # added to gpt2's key biases, which shifts scores and leaves their softmax unchanged


def build(spec, dtype=torch.float32, attention=None):
    """A tiny model; equal specs give equal weights, rounded to the dtype."""
    torch.manual_seed(spec.seed)
    extra = {} if attention is None else {"attn_implementation": attention}
    if spec.type not in TYPES:
        extra["experts_implementation"] = "eager"  # the grouped matmul does not support fp64
    model = AutoModelForCausalLM.from_config(_config(spec), dtype=torch.float32, **extra)
    _make_every_parameter_matter(model)
    if spec.score_offset:
        _offset_scores(model, spec.score_offset)
    return model.to(dtype)


def _config(spec):
    """The config with the sizes of the spec, or ds_cp's tiny config for a type without a line in TYPES."""
    if spec.type not in TYPES:
        return tiny_config(spec.type, **dict(spec.overrides))
    names = dict(hidden=spec.heads * HEAD_DIM, mlp=96, layers=spec.layers, heads=spec.heads, kv_heads=spec.kv_heads)
    names["vocab"] = VOCAB
    sizes = {
        key: names[value[1:-1]] if isinstance(value, str) and value[0] == "{" else value
        for key, value in TYPES[spec.type].items()
    }
    return CONFIG_MAPPING[spec.type](**copy.deepcopy(sizes | dict(spec.overrides)))


def rounded(model, dtype):
    """A copy in fp64 of the model rounded to `dtype`: the exact model of a run in that dtype."""
    return copy.deepcopy(model).to(dtype).double()


def _make_every_parameter_matter(model):
    """Make norm weights and biases random: values of one and zero would hide errors."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _offset_scores(model, offset):
    with torch.no_grad():
        for layer in model.transformer.h:
            _, key_bias, _ = layer.attn.c_attn.bias.chunk(3)
            key_bias.add_(offset)


class TransformersInDouble(TorchFunctionMode):
    """A mode in which transformers computes in fp64 what it would cast to fp32: norms, softmax, rotary angles, loss.

    It changes calls in files of transformers only. Other code must preserve fp64.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _CASTING and _called_from_transformers():
            if function is torch.Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


_CASTING = {
    torch.Tensor.float,
    torch.Tensor.to,
    torch.Tensor.type,
    torch.nn.functional.softmax,
    torch.softmax,
    torch.Tensor.softmax,
    torch.zeros_like,
}


def _called_from_transformers():
    frame = sys._getframe(2)
    while frame is not None and inspect.getmodulename(frame.f_code.co_filename) in (
        "functional",
        "overrides",
    ):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("transformers.")
