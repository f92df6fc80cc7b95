"""Attention that a checkpointed layer computes once: its first run keeps (out, lse) of each call, its second takes them.

Gradient checkpointing runs a layer again in the backward pass. Projections are cheap to run again; attention is not, and
shared attention would communicate again. What is kept instead is one tensor of the hidden states' size per layer.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch


def _as_it_is(tensor: Any) -> Any:
    return tensor


class SavedAttention:
    """What the attention calls of one run of one layer left for its recomputation, in the order of the calls.

    Args:
        away, back: where outputs wait, and how they return.
    """

    def __init__(
        self, away: Callable[[torch.Tensor], Any] = _as_it_is, back: Callable[[Any], torch.Tensor] = _as_it_is
    ) -> None:
        self._runs, self._away, self._back = 0, away, back
        self._calls: deque[tuple[Any, torch.Tensor]] = deque()

    @contextmanager
    def run(self) -> Iterator[None]:
        """While the layer runs. What the recomputation does not take is let go; one more run computes everything."""
        self._runs += 1
        try:
            yield
        finally:
            if self._runs > 1:
                self._calls.clear()

    def put(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Keep what a call computed, in the first run only; without its graph, which would keep this alive in turn."""
        if self._runs == 1:
            self._calls.append((self._away(out.detach()), lse))

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(out, lse) of the next call; None in the first run, and in any after the second."""
        if self._runs == 1 or not self._calls:
            return None
        out, lse = self._calls.popleft()
        return self._back(out), lse
