"""Which kernels this machine can run, and the best of them with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Sequence

import torch

from ds_cp.attention import kernels
from ds_cp.attention.kernels.binding import UnknownVersion


@dataclass(frozen=True)
class Package:
    """What a kernel needs.

    Attributes:
        label: how messages call it.
        module: imported by the kernel.
        distribution: must be installed too; the name ``flash_attn.cute`` also lies inside flash-attn 2.8.
        cards: first numbers of the compute capabilities that it is for, and what they are called.
        install: how to get it.
    """

    label: str
    module: str
    distribution: str | None
    cards: tuple[range, str]
    install: str


PACKAGES = {
    "flash_attention_4": Package(
        "the package flash-attn-4",
        "flash_attn.cute",
        "flash-attn-4",
        (range(9, 12), "a Blackwell or Hopper card (compute capability 9 to 11)"),
        '"pip install flash-attn-4"',
    ),
    "flash_attention_3": Package(
        "the module flash_attn_interface of FlashAttention 3",
        "flash_attn_interface",
        None,
        (range(9, 10), "a Hopper card (compute capability 9)"),
        'building it from the folder "hopper" of the flash-attention repository',
    ),
    "flash_attention_2": Package(
        "the package flash-attn",
        "flash_attn",
        "flash-attn",
        (range(8, 100), "an Ampere or newer card (compute capability 8)"),
        '"pip install flash-attn --no-build-isolation"',
    ),
}


def capability() -> tuple[int, int] | None:
    """The compute capability of the current NVIDIA card; None without one."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return torch.cuda.get_device_capability()


def torch_has_flash() -> bool:
    """Whether the FlashAttention inside torch runs on the current card; an older one runs by formulas."""
    card = capability()
    return card is not None and card[0] >= 8


def problem(name: str, device: str) -> str | None:
    """Why a kernel cannot run here and what to do about it, as the end of a sentence; None if it can."""
    if name not in PACKAGES:
        return None
    package = PACKAGES[name]
    if device != "cuda":
        return f'it needs an NVIDIA card and this job runs on "{device}". Use "torch" or "auto"'
    card = capability()
    if card is not None and card[0] not in package.cards[0]:
        return f'it needs {package.cards[1]} and this one has {card[0]}.{card[1]}. Use "auto"'
    if not _installed(package):
        return f'{package.label} is not installed here. Install it by {package.install}, or use "auto"'
    if card is None:
        return 'no NVIDIA card is visible here. Use "torch" or "auto"'
    try:
        kernels.make(name)
    except (ImportError, AttributeError, OSError, UnknownVersion) as error:
        return f'{package.label} cannot be used: {error}. Install another version, or use "auto"'
    return None


def best(device: str, head_dims: Sequence[int]) -> tuple[str, str]:
    """(kernel, why) for ``"auto"``.

    Dtype and score rule are the call's, not the plan's: what the chosen kernel does not take (fp32 on CUDA, ALiBi,
    dropout, ...) goes to torch's kernel or the formulas, call by call.
    """
    if device == "cpu":
        return "torch", "the FlashAttention that torch ships for CPUs"
    card = capability() if device == "cuda" else None
    if card is None:
        return "torch", f'no NVIDIA card is visible for "{device}"; calls that torch\'s kernel refuses run by formulas'
    order = [*(["flash_attention_4"] if card[0] >= 10 else []), "flash_attention_3", "flash_attention_2"]
    if not torch_has_flash():
        return "torch", (
            f"no FlashAttention runs on compute capability {card[0]}.{card[1]}, so everything runs by formulas, which is "
            "slow; an Ampere or newer card (8) has one"
        )
    wide = [dim for dim in head_dims if dim > 256]
    rest = f"fp32 runs by formulas{', and so do layers of head dim ' + str(max(wide)) if wide else ''}"
    for name in order:
        if problem(name, device) is None:
            return name, f"the best installed one for compute capability {card[0]}.{card[1]}; {rest}"
    return "torch", f"the FlashAttention 2 that torch ships, no usable package is installed; {rest}"


def _installed(package: Package) -> bool:
    try:
        if package.distribution:
            version(package.distribution)
        return find_spec(package.module) is not None
    except (PackageNotFoundError, ImportError, OSError, ValueError):
        return False
