"""Which kernels this machine can run, and which of them is the best."""

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
    """The package that a kernel needs.

    Attributes:
        label: Name of the package in messages.
        module: Module that the kernel imports.
        distribution: Distribution that must be installed, too: flash-attn 2.8 also has a module ``flash_attn.cute``. None if
            the package has no distribution.
        capabilities: Major compute capabilities of the GPUs that it supports.
        gpus: Name of these GPUs in messages.
        install: How to install it, for messages.
    """

    label: str
    module: str
    distribution: str | None
    capabilities: range
    gpus: str
    install: str


PACKAGES = {
    "flash_attention_4": Package(
        "the package flash-attn-4",
        "flash_attn.cute",
        "flash-attn-4",
        range(9, 12),
        "a Blackwell or Hopper GPU (compute capability 9 to 11)",
        '"pip install flash-attn-4"',
    ),
    "flash_attention_3": Package(
        "the module flash_attn_interface of FlashAttention 3",
        "flash_attn_interface",
        None,
        range(9, 10),
        "a Hopper GPU (compute capability 9)",
        'building it from the folder "hopper" of the flash-attention repository',
    ),
    "flash_attention_2": Package(
        "the package flash-attn",
        "flash_attn",
        "flash-attn",
        range(8, 100),
        "an Ampere or newer GPU (compute capability 8)",
        '"pip install flash-attn --no-build-isolation"',
    ),
}


def capability() -> tuple[int, int] | None:
    """The compute capability of the current NVIDIA GPU; None without one."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return torch.cuda.get_device_capability()


def torch_has_flash() -> bool:
    """Whether the current GPU runs the FlashAttention inside torch; older GPUs run the reference kernel."""
    current = capability()
    return current is not None and current[0] >= 8


def problem(name: str, device: str) -> str | None:
    """Why a kernel cannot run here and what to change, as the end of a sentence; None if it can run."""
    if name not in PACKAGES:
        return None
    package = PACKAGES[name]
    if device != "cuda":
        return f'it needs an NVIDIA GPU and this job runs on "{device}". Use "torch" or "auto"'
    current = capability()
    if current is not None and current[0] not in package.capabilities:
        return f'it needs {package.gpus} and this one has {current[0]}.{current[1]}. Use "auto"'
    if not _installed(package):
        return f'{package.label} is not installed here. Install it by {package.install}, or use "auto"'
    if current is None:
        return 'no NVIDIA GPU is visible here. Use "torch" or "auto"'
    try:
        kernels.make(name)
    except (ImportError, AttributeError, OSError, UnknownVersion) as error:
        return f'{package.label} cannot be used: {error}. Install another version, or use "auto"'
    return None


def best(device: str, head_dims: Sequence[int]) -> tuple[str, str]:
    """The kernel of ``"auto"``, and the reason for it.

    Dtype and score rule are known only when a layer runs. A call that the kernel does not take (fp32 on CUDA, ALiBi,
    dropout, ...) runs by torch's kernel or by the reference kernel.
    """
    if device == "cpu":
        return "torch", "the FlashAttention that torch ships for CPUs"
    current = capability() if device == "cuda" else None
    if current is None:
        return (
            "torch",
            f'no NVIDIA GPU is visible for "{device}"; calls that torch\'s kernel refuses run by the reference kernel',
        )
    preferred = [*(["flash_attention_4"] if current[0] >= 10 else []), "flash_attention_3", "flash_attention_2"]
    if not torch_has_flash():
        return "torch", (
            f"no FlashAttention runs on compute capability {current[0]}.{current[1]}, so everything runs by the reference kernel, which is "
            "slow; an Ampere or newer GPU (8) has one"
        )
    wide_heads = [dim for dim in head_dims if dim > 256]
    rest = f"fp32 runs by the reference kernel{', and so do layers of head dim ' + str(max(wide_heads)) if wide_heads else ''}"
    for name in preferred:
        if problem(name, device) is None:
            return name, f"the best installed one for compute capability {current[0]}.{current[1]}; {rest}"
    return "torch", f"the FlashAttention 2 that torch ships, no usable package is installed; {rest}"


def _installed(package: Package) -> bool:
    try:
        if package.distribution:
            version(package.distribution)
        return find_spec(package.module) is not None
    except (PackageNotFoundError, ImportError, OSError, ValueError):
        return False
