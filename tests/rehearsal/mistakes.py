"""Mistakes to plant in a run, each of which the rehearsal must report."""

from __future__ import annotations

from typing import Callable

import torch

aten = torch.ops.aten


def _before_attention(do: Callable[[torch.Tensor], None]) -> None:
    """Do something in each call of torch's kernel, which is inside of a layer."""
    from ds_cp.attention.kernels.torch_flash import TorchCudaKernel

    run = TorchCudaKernel.run_forward

    def run_forward(self, q, k, v, launch, score):
        do(q)
        return run(self, q, k, v, launch, score)

    TorchCudaKernel.run_forward = run_forward


def _in_backward(do: Callable[[torch.Tensor], None]) -> None:
    from ds_cp.attention.kernels.torch_flash import TorchCudaKernel

    run = TorchCudaKernel.run_backward

    def run_backward(self, grad_out, q, *rest):
        do(q)
        return run(self, grad_out, q, *rest)

    TorchCudaKernel.run_backward = run_backward


def host_tensor_in_a_sum() -> None:
    _before_attention(lambda q: q + torch.zeros(q.shape, dtype=q.dtype, device="cpu"))


def host_tensor_in_a_layer() -> None:
    _before_attention(lambda q: torch.arange(q.size(0) + 1, device="cpu") * 2)


def other_card() -> None:
    _before_attention(lambda q: torch.zeros(2, device="cuda:0"))


def item_in_a_layer() -> None:
    _before_attention(lambda q: q.float().abs().max().item())


def item_in_the_backward_pass() -> None:
    _in_backward(lambda q: q.float().abs().max().item())


def nonzero_in_a_layer() -> None:
    _before_attention(lambda q: torch.arange(4, device=q.device).nonzero())


def blocking_copy_in_a_layer() -> None:
    _before_attention(lambda q: torch.tensor([0, 1, 2], device=q.device))


def synchronize_in_a_layer() -> None:
    _before_attention(lambda q: torch.cuda.synchronize())


def product_without_out_dtype() -> None:
    for name in ("addmm", "baddbmm", "mm", "bmm"):
        original = getattr(torch, name)
        setattr(torch, name, lambda *args, _of=original, out_dtype=None, **kwargs: _of(*args, **kwargs))


def product_with_an_fp32_sum() -> None:
    """A whole sum in fp32, factors in bf16, and nothing that says so."""

    def multiply(q):
        rows = q.flatten(0, -2)
        torch.addmm(torch.zeros(rows.size(0), rows.size(0), device=q.device), rows, rows.t())

    _in_backward(multiply)


def swapped_arguments() -> None:
    """``dropout_p`` and ``is_causal``: the dispatcher takes False for 0.0 and refuses 0.0 for False, or not."""
    from ds_cp.attention.kernels.torch_flash import TorchCudaKernel

    def run_forward(self, q, k, v, launch, score):
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, launch.causal, 0.0, False, scale=score.scale
        )
        return out, lse

    TorchCudaKernel.run_forward = run_forward


def swapped_booleans() -> None:
    """``is_causal`` and ``return_debug_mask`` have one type."""
    from ds_cp.attention.kernels.torch_flash import TorchCudaKernel

    def run_forward(self, q, k, v, launch, score):
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, False, True, scale=score.scale
        )
        return out, lse

    TorchCudaKernel.run_forward = run_forward


def wrong_longest() -> None:
    """The longest of all documents is said to be one token longer."""
    from ds_cp.attention.kernels.torch_flash import TorchCudaKernel

    def run_forward(self, q, k, v, launch, score):
        out, lse, *_ = aten._flash_attention_forward(
            q,
            k,
            v,
            launch.cu_q,
            launch.cu_k,
            launch.max_q + 1,
            launch.max_k,
            0.0,
            launch.causal,
            False,
            scale=score.scale,
        )
        return out, lse

    TorchCudaKernel.run_forward = run_forward


def float16_buffer() -> None:
    _before_attention(lambda q: q.new_empty(q.shape, dtype=torch.float16).zero_())


def more_launches() -> None:
    def copy_often(q):
        for _ in range(40):
            q.clone()

    _before_attention(copy_often)


def kept_activations() -> None:
    kept = []
    _before_attention(lambda q: kept.extend(q.clone() for _ in range(8)))


def device_chosen_too_late() -> None:
    """As before the device was chosen ahead of a group's first message."""
    from ds_cp.patches import deepspeed as of_deepspeed

    of_deepspeed._choose_device = lambda args: None


def plant(name: str | None) -> None:
    """Plant a mistake by its name, if there is one."""
    if name is not None:
        globals()[name]()
