"""Attention outputs that a checkpointed layer saves, so that its recomputation does not run attention again.

Gradient checkpointing runs a layer a second time in the backward pass. Projections are cheap to recompute; attention is
not, and context-parallel attention would communicate again. Saving its output and lse costs about one tensor of the size of
the hidden states per layer.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch


def _identity(tensor: Any) -> Any:
    return tensor


class SavedAttention:
    """The outputs of the attention calls of one layer, in the order of the calls.

    Args:
        offload: Moves an output to where it is stored.
        reload: Moves a stored output back.
    """

    def __init__(
        self, offload: Callable[[torch.Tensor], Any] = _identity, reload: Callable[[Any], torch.Tensor] = _identity
    ) -> None:
        self._runs, self._offload, self._reload = 0, offload, reload
        self._calls: deque[tuple[Any, torch.Tensor]] = deque()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Context of one run of the layer: the first saves, the second takes, and any later one computes everything.

        Whatever the second run does not take is freed.
        """
        self._runs += 1
        try:
            yield
        finally:
            if self._runs > 1:
                self._calls.clear()

    def put(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Saves the result of a call in the first run. It is detached: its graph would refer to this object."""
        if self._runs == 1:
            self._calls.append((self._offload(out.detach()), lse))

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(out, lse) of the next call in the second run; None in any other run."""
        if self._runs == 1 or not self._calls:
            return None
        out, lse = self._calls.popleft()
        return self._reload(out), lse
