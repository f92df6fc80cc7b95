"""FlashAttention 3 (Shah et al. 2024), for Hopper: the module flash_attn_interface, built from the hopper folder of the
flash-attention repository (it is on no package index).

One private pair of functions serves dense and varlen. Its arguments were renamed once: ``window_size`` became two numbers,
``out`` became ``out_``, and in the backward function ``causal`` became ``is_causal``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from ds_cp.attention.kernels.binding import bind
from ds_cp.attention.kernels.flash import FlashKernel, empty_gradients
from ds_cp.attention.kernels.windows import Launch
from ds_cp.attention.score import Score

MODULE = "flash_attn_interface"

COMMON = ("q", "k", "v", "softmax_scale", "causal", "is_causal", "window_size", "window_size_left", "window_size_right",
          "softcap", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
UNUSED = ("k_new", "v_new", "qv", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx", "leftpad_k",
          "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")  # fmt: skip
FORWARD = (*COMMON, *UNUSED, "out", "out_")
BACKWARD = (*COMMON, "dout", "out", "softmax_lse", "dq", "dk", "dv", "sequed_q", "sequed_k", "deterministic")
NEEDS = ("q", "k", "v", "softmax_scale", "window_size|window_size_left", "window_size|window_size_right",
         "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
GRADS = ("dout", "out", "softmax_lse", "dq", "dk", "dv")


class FlashAttention3(FlashKernel):
    """FlashAttention 3, for Hopper GPUs.

    Args:
        module: Replacement for the package's module, for tests.
    """

    name = "flash_attention_3"
    score_features = frozenset({"softcap"})

    def __init__(self, module: ModuleType | None = None):
        module = module or importlib.import_module(MODULE)
        self._forward = bind(module._flash_attn_forward, FORWARD, NEEDS)
        self._backward = bind(module._flash_attn_backward, BACKWARD, NEEDS + GRADS)

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unused = dict.fromkeys((*UNUSED, "out", "out_"))
        out, lse, *_ = self._forward(q=q, k=k, v=v, **unused, **_arguments(launch, score))
        return out, lse

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
        self._backward(
            dout=grad_out, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, sequed_q=None, sequed_k=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_arguments(launch, score),
        )  # fmt: skip
        return dq, dk, dv


def _arguments(launch: Launch, score: Score) -> dict[str, Any]:
    """The arguments of forward and backward, under all names that they have in some version."""
    return {
        "softmax_scale": score.scale,
        "causal": launch.causal,
        "is_causal": launch.causal,
        "window_size": (launch.left, launch.right),
        "window_size_left": launch.left,
        "window_size_right": launch.right,
        "softcap": score.softcap or 0.0,
        "cu_seqlens_q": launch.cu_q,
        "cu_seqlens_k": launch.cu_k,
        "max_seqlen_q": launch.max_q if launch.varlen else None,
        "max_seqlen_k": launch.max_k if launch.varlen else None,
    }
