"""Check that weights that are used a second time are still those of the first time, as autograd does for saved tensors."""

from __future__ import annotations

from typing import Iterator

import torch


class WeightVersions:
    """Identities and versions of a module's parameters and buffers.

    In-place operations increase the version of a tensor. Like autograd, the check does not notice changes that bypass versions:
    those through ``.data``, and so ZeRO's gathering of weights.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._recorded = [(name, tensor, _version(tensor)) for name, tensor in _tensors(module)]

    def check(self, module: torch.nn.Module, use: str) -> None:
        """Compare the tensors of the same module with the recorded ones.

        Args:
            module: The module.
            use: What the weights are used for, for the message.

        Raises:
            RuntimeError: A tensor was replaced, or changed in place.
        """
        now = dict(_tensors(module))
        for name, tensor, version in self._recorded:
            if now.get(name) is not tensor:
                what = "is another tensor"
            elif _version(tensor) != version:
                what = "was changed in place"
            else:
                continue
            raise RuntimeError(
                f"{name} of {type(module).__name__} {what} since the forward pass, and {use} would silently be of a mixture of "
                "both. Change weights after the backward pass only"
                + (", also those that torch.func.functional_call puts in." if what == "is another tensor" else ".")
            )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
