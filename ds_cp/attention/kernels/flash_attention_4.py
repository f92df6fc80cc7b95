"""FlashAttention 4, package flash-attn-4 (CuTe DSL, compiled at first use), for Blackwell and Hopper.

``flash_attn.cute`` exports the two public functions only; the private pair under them is in its module ``interface``.
Forward returns 2 values in early betas and 5 since; the first two are out and lse. An open edge of a window is None. The
copy of ``flash_attn.cute`` inside flash-attn 2.8 has no windows in its backward function; :func:`bind` refuses it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from ds_cp.attention.kernels.binding import bind
from ds_cp.attention.kernels.flash import FlashKernel, empty_gradients
from ds_cp.attention.kernels.windows import ALL, Launch
from ds_cp.attention.score import Score

MODULE = "flash_attn.cute.interface"

COMMON = ("q", "k", "v", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right", "cu_seqlens_q",
          "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
FORWARD = (*COMMON, "return_lse")
GRADS = ("out", "dout", "lse", "dq", "dk", "dv", "deterministic")


class FlashAttention4(FlashKernel):
    """FlashAttention 4, for Blackwell and Hopper GPUs.

    Args:
        module: Replacement for the package's module, for tests.
        blackwell: Whether the head dims of Blackwell apply; None to take them from the current device.
    """

    name = "flash_attention_4"
    score_features = frozenset({"softcap"})

    def __init__(self, module: ModuleType | None = None, blackwell: bool | None = None):
        module = module or importlib.import_module(MODULE)
        self._forward = bind(module._flash_attn_fwd, FORWARD, FORWARD)
        self._backward = bind(module._flash_attn_bwd, COMMON + GRADS, COMMON + GRADS)
        self._blackwell = torch.cuda.get_device_capability()[0] >= 10 if blackwell is None else blackwell

    def padded_head_dims(self, dim: int, value_dim: int) -> tuple[int, int]:
        """On Blackwell: head dims up to 128, DeepSeek's pair (192, 128), and 256."""
        width = super().padded_head_dims(dim, value_dim)[0]
        if not self._blackwell or width <= 128:
            return width, width
        return (192, 128) if dim <= 192 and value_dim <= 128 else (max(width, 256),) * 2

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(q=q, k=k, v=v, return_lse=True, softcap=score.softcap, **_arguments(launch, score))
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
            q=q, k=k, v=v, out=out, dout=grad_out, lse=lse, dq=dq, dk=dk, dv=dv,
            softcap=score.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
            **_arguments(launch, score),
        )  # fmt: skip
        return dq, dk, dv


def _arguments(launch: Launch, score: Score) -> dict[str, Any]:
    """The arguments of both forward and backward."""
    left, right = (None if edge == ALL else edge for edge in (launch.left, launch.right))
    return {
        "softmax_scale": score.scale,
        "causal": launch.causal,
        "window_size_left": left,
        "window_size_right": right,
        "cu_seqlens_q": launch.cu_q,
        "cu_seqlens_k": launch.cu_k,
        "max_seqlen_q": launch.max_q if launch.varlen else None,
        "max_seqlen_k": launch.max_k if launch.varlen else None,
    }
