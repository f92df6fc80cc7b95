"""FlashAttention 2 (Dao 2023), package flash-attn 2.5 to 2.8.

The public functions accept no *global* log-sum-exp in the backward pass, so the private functions under them are called:
forward and backward, dense and varlen. All differences between versions are listed here:

- 2.5: ``window_size`` is a pair, and forward returns 8 values with lse sixth. varlen pads lse to the longest document, so
  documents run one by one.
- 2.6: adds ``softcap``; varlen lse is [H, total].
- 2.7: ``window_size_left`` and ``_right``, torch custom operators, forward returns 4 values with lse second, and the caller
  must pad head dims (:class:`~ds_cp.attention.kernels.flash.FlashKernel` always does).
- 2.7.3: adds ``zero_tensors``, which has a default.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from ds_cp.attention.kernels.binding import bind, parameters
from ds_cp.attention.kernels.flash import FlashKernel, empty_gradients
from ds_cp.attention.kernels.windows import Launch
from ds_cp.attention.score import Score

MODULE = "flash_attn.flash_attn_interface"

COMMON = ("dropout_p", "softmax_scale", "causal", "window_size", "window_size_left", "window_size_right", "softcap")
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table", "leftpad_k", "seqused_k")
FORWARD = (*COMMON, "q", "k", "v", "alibi_slopes", "return_softmax")
BACKWARD = (*COMMON, "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "alibi_slopes", "deterministic",
            "rng_state")  # fmt: skip
NEEDS = ("q", "k", "v", "softmax_scale", "window_size|window_size_left", "window_size|window_size_right")
GRADS = ("dout", "out", "softmax_lse", "dq", "dk", "dv")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class FlashAttention2(FlashKernel):
    """FlashAttention 2, for Ampere and newer GPUs.

    Args:
        module: Replacement for the package's module, for tests.
    """

    name = "flash_attention_2"

    def __init__(self, module: ModuleType | None = None):
        module = module or importlib.import_module(MODULE)
        self._forward = bind(module._flash_attn_forward, FORWARD, NEEDS)
        self._backward = bind(module._flash_attn_backward, BACKWARD, NEEDS + GRADS)
        self._forward_varlen = bind(module._flash_attn_varlen_forward, FORWARD + VARLEN, NEEDS + LENGTHS)
        self._backward_varlen = bind(module._flash_attn_varlen_backward, BACKWARD + VARLEN, NEEDS + GRADS + LENGTHS)
        self.varlen = "softcap" in parameters(
            module._flash_attn_varlen_forward
        )  # 2.6 added softcap and the new varlen lse
        self.score_features = frozenset({"softcap"}) if self.varlen else frozenset()

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run = self._forward_varlen if launch.varlen else self._forward
        out, *rest = run(q=q, k=k, v=v, return_softmax=False, **_arguments(launch, score))
        return out, rest[0] if len(rest) == 3 else rest[4]

    def run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        launch: Launch,
        score: Score,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = empty_gradients(q, k, v)
        run = self._backward_varlen if launch.varlen else self._backward
        run(dout=grad_out, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, rng_state=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_arguments(launch, score))  # fmt: skip
        return dq, dk, dv


def _arguments(launch: Launch, score: Score) -> dict[str, Any]:
    """The arguments of forward and backward, under all names that they have in some version."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": score.scale,
        "causal": launch.causal,
        "window_size": (launch.left, launch.right),
        "window_size_left": launch.left,
        "window_size_right": launch.right,
        "softcap": score.softcap or 0.0,
        "alibi_slopes": None,
        "cu_seqlens_q": launch.cu_q,
        "cu_seqlens_k": launch.cu_k,
        "max_seqlen_q": launch.max_q,
        "max_seqlen_k": launch.max_k,
        "block_table": None,
        "leftpad_k": None,
        "seqused_k": None,
    }
