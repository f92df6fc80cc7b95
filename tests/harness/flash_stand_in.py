"""Modules with the exact signatures of the FlashAttention packages that compute attention on the CPU in any dtype.

A signature comes from tests/data/flash_signatures.json and is compiled as it stands, so that a call with an argument
too many, too few or renamed fails as it would in the package; from 2.7 on the functions are torch custom operators, as
there. What the packages demand of tensors is asserted, and FlashAttention 2's treatment of windows is copied, traps
included. The formulas share no code with ds_cp.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Callable, Optional, Sequence

import torch

from harness.paths import DATA

SIGNATURES: dict[str, dict[str, dict[str, Any]]] = json.loads((DATA / "flash_signatures.json").read_text())
VERSIONS = [(kernel, version) for kernel in sorted(SIGNATURES) for version in sorted(SIGNATURES[kernel])]

_modules: dict[tuple[str, str], SimpleNamespace] = {}


def stand_in(kernel: str, version: str) -> SimpleNamespace:
    """The module of one version; ``calls`` lists (function, number of documents or None) of what was called."""
    if (kernel, version) not in _modules:
        module = SimpleNamespace(calls=[])
        for name, signature in SIGNATURES[kernel][version].items():
            setattr(module, name, _function(kernel, version, name, signature, module.calls))
        _modules[kernel, version] = module
    _modules[kernel, version].calls.clear()
    return _modules[kernel, version]


def _function(kernel: str, version: str, name: str, signature: dict[str, Any], calls: list[Any]) -> Callable[..., Any]:
    def body(arguments: dict[str, Any]) -> Any:
        lengths = arguments.get("cu_seqlens_q")
        calls.append((name, None if lengths is None else len(lengths) - 1))
        compute = _backward if "dout" in arguments else _forward
        values = compute(_Call(kernel, version, arguments))
        spare = torch.empty(0) if signature.get("custom_op") else None
        returned = [values.get(r) if values.get(r) is not None else _copy(spare) for r in signature["returns"]]
        return returned[0] if len(returned) == 1 else tuple(returned)

    names = {"torch": torch, "Optional": Optional, "Tuple": tuple, "Callable": Callable, "_body": body}
    returns = f" -> {signature['annotation']}" if "annotation" in signature else ""
    text = f"def {name}({_known(signature['parameters'])}){returns}:\n    return _body(dict(locals()))"
    exec(text, names)
    if signature.get("custom_op"):
        label = f"ds_cp_stand_in::{name}_{kernel}_{''.join(c if c.isalnum() else '_' for c in version)}"
        return torch.library.custom_op(label, names[name], mutates_args=tuple(signature["mutates"]))
    return names[name]


def _known(parameters: str) -> str:
    """Replace types of the packages by `object`."""
    for word in ("BlockSparseTensorsTorch", "SchedulerMetadataTensorsTorch"):
        parameters = parameters.replace(word, "object")
    return parameters


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


class _Call:
    """The checked arguments of a call, under the same names for all packages."""

    def __init__(self, kernel: str, version: str, arguments: dict[str, Any]):
        self.two = kernel == "flash_attention_2"
        self.padded_lse = self.two and version.startswith("2.5")
        for name, value in arguments.items():
            setattr(self, name, value)
        self.arguments = arguments
        self.scale = self.softmax_scale
        self.causal = arguments.get("is_causal", arguments.get("causal"))
        self.cap = arguments.get("softcap") or 0.0
        window = arguments.get("window_size")
        left, right = window or (arguments["window_size_left"], arguments["window_size_right"])
        if kernel == "flash_attention_4":
            assert (left is None or left >= 0) and (right is None or right >= 0), "open edges are None"
        self.window = tuple(-1 if edge is None else edge for edge in (left, right))
        self.several = arguments.get("cu_seqlens_q") is not None
        self._check()

    def _check(self) -> None:
        widths = {self.arguments["q"].size(-1), self.arguments["v"].size(-1)}
        assert all(width % 8 == 0 for width in widths) and (len(widths) == 1 or widths == {192, 128})
        tensors = [
            self.arguments[name] for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv") if name in self.arguments
        ]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                assert tensor.stride(-1) == 1 and tensor.dim() == (3 if self.several else 4)
                assert tensor.dtype == self.arguments["q"].dtype
                assert all(s % 8 == 0 for s, n in zip(tensor.stride()[:-1], tensor.shape) if n > 1), "16 bytes"
        lse = self.arguments.get("softmax_lse", self.arguments.get("lse"))
        if lse is not None:
            assert lse.is_contiguous()
        if self.several:
            assert self.cu_seqlens_q.dtype == self.cu_seqlens_k.dtype == torch.int32
            assert type(self.max_seqlen_q) is type(self.max_seqlen_k) is int
            assert (
                self.max_seqlen_q == self.cu_seqlens_q.diff().max()
                and self.max_seqlen_k == self.cu_seqlens_k.diff().max()
            )

    def documents(self) -> list[tuple[slice, slice]]:
        """(queries, keys) of each document; one document without cu_seqlens."""
        if not self.several:
            return [(slice(None), slice(None))]
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [(slice(*a), slice(*b)) for a, b in zip(zip(q, q[1:]), zip(k, k[1:]))]

    def rows(self, name: str, part: slice) -> torch.Tensor:
        """[B, H, m, d] of one document, in fp32 or fp64."""
        x = self.arguments[name]
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return (x[part].unsqueeze(0) if self.several else x).transpose(1, 2)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(masked scores, their derivative with respect to q k^T), each [B, H, m, n]."""
        m, n = q.size(-2), k.size(-2)
        left, right = self.window
        longest = self.max_seqlen_k if self.several else n
        if self.two:  # as in csrc/flash_attn/flash_api.cpp
            left, right = (-1 if edge >= longest else edge for edge in (left, right))
        right = 0 if self.causal else right
        if self.two and left >= 0 and right < 0:
            right = longest
        distance = torch.arange(n) - torch.arange(m).unsqueeze(-1) - (n - m)
        hidden = torch.zeros(m, n, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        products = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2) * self.scale
        capped = torch.tanh(products / self.cap) * self.cap if self.cap else products
        slope = self.scale * (1 - (capped / self.cap) ** 2) if self.cap else torch.full_like(products, self.scale)
        return capped.masked_fill(hidden, -torch.inf), slope


def _forward(call: _Call) -> dict[str, Any]:
    outs, lses = [], []
    for queries, keys in call.documents():
        q, k, v = call.rows("q", queries), call.rows("k", keys), call.rows("v", keys)
        scores, _ = call.scores(q, k)
        lses.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1) @ v.repeat_interleave(q.size(1) // v.size(1), 1)).transpose(1, 2))
    if not call.several:
        out, lse = outs[0], lses[0]
    elif call.padded_lse:
        out = torch.cat([o[0] for o in outs])
        lse = torch.cat([torch.nn.functional.pad(x, (0, call.max_seqlen_q - x.size(-1))) for x in lses])
    else:
        out, lse = torch.cat([o[0] for o in outs]), torch.cat([x[0] for x in lses], dim=-1)
    out = out.contiguous().to(call.q.dtype)
    return {"out": out, "softmax_lse": lse.contiguous(), "lse": lse.contiguous()}


def _backward(call: _Call) -> dict[str, Any]:
    lse_all = call.arguments.get("softmax_lse", call.arguments.get("lse"))
    for queries, keys in call.documents():
        q, k, v, out, dout = (
            call.rows(name, part)
            for name, part in (("q", queries), ("k", keys), ("v", keys), ("out", queries), ("dout", queries))
        )
        lse = lse_all[None, :, queries] if call.several else lse_all
        groups = q.size(1) // k.size(1)
        scores, slope = call.scores(q, k)
        p = torch.exp(scores - lse.unsqueeze(-1))
        wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
        ds = p * (dout @ wide_v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * slope
        grads = ds @ wide_k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout
        for name, part, grad in zip(("dq", "dk", "dv"), (queries, keys, keys), grads):
            if name != "dq":
                grad = grad.unflatten(1, (k.size(1), groups)).sum(2)
            target = call.arguments[name]
            (target[part].unsqueeze(0) if call.several else target).copy_(grad.transpose(1, 2))
    return {name: call.arguments[name] for name in ("dq", "dk", "dv")}


def make_kernel(kernel: str, version: str, dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64)) -> Any:
    """The ds_cp kernel over a stand-in, on the CPU."""
    from ds_cp.attention.kernels.flash_attention_2 import FlashAttention2
    from ds_cp.attention.kernels.flash_attention_3 import FlashAttention3
    from ds_cp.attention.kernels.flash_attention_4 import FlashAttention4

    module = stand_in(kernel, version)
    made = {
        "flash_attention_2": lambda: FlashAttention2(module),
        "flash_attention_3": lambda: FlashAttention3(module),
        "flash_attention_4": lambda: FlashAttention4(module, blackwell=True),
    }[kernel]()
    made.device, made.dtypes = "cpu", tuple(dtypes)
    return made
