"""Random number streams inside a region.

Inside a region each rank draws from its own stream, because each rank holds different tokens. The outer stream is restored
on exit. If the region used random numbers, the outer stream then advances by one draw, equally on all ranks, so that the
next region uses others. A model without dropout thus sees exactly the random numbers of a run without ds_cp.
"""

from __future__ import annotations

import hashlib

import torch
from deepspeed.accelerator import get_accelerator

State = tuple[torch.Tensor, ...]
"""States of the CPU's random number generator and, where there is an accelerator, of the current device's."""


class ForkedRng:
    """Switches to a random stream of this rank. :meth:`close` returns to the outer stream.

    The seed of the inner stream is a hash of the outer stream's state and of the rank, so runs are reproducible.

    Attributes:
        outer_seed: Hash of the outer stream's state, 56 bits, equal on ranks that were seeded alike.
    """

    def __init__(self, rank: int) -> None:
        self._outer_state = state()
        digest = hashlib.blake2b(b"".join(each.numpy().tobytes() for each in self._outer_state), digest_size=7)
        self.outer_seed = int.from_bytes(digest.digest(), "little")
        digest.update(rank.to_bytes(4, "little"))
        self._inner_seed = int.from_bytes(digest.digest(), "little")
        torch.manual_seed(self._inner_seed)
        self._inner_state = state()

    def close(self, drawn: bool = False) -> None:
        """Restore the outer stream, and advance it by one draw if the region used random numbers.

        Args:
            drawn: Whether the region used random numbers that no stream counts (:meth:`ds_cp.region.Region.seed`).
        """
        drawn = drawn or drawn_since(self._inner_state)
        torch.set_rng_state(self._outer_state[0])
        if len(self._outer_state) > 1:
            get_accelerator().set_rng_state(self._outer_state[1])
        if drawn:
            for device in {"cpu", get_accelerator().current_device_name()}:
                torch.rand(1, device=device)

    def close_interrupted(self) -> None:
        """Close the stream of a region that an exception such as KeyboardInterrupt left open.

        A stream that somebody has seeded since is left alone.
        """
        if torch.initial_seed() == self._inner_seed:
            self.close(drawn=True)  # ranks may have been interrupted at different points, and must advance alike


def state() -> State:
    """Current states of the random number generators."""
    accelerator = get_accelerator()
    states = (torch.get_rng_state(),)
    return states if accelerator.device_name() == "cpu" else states + (accelerator.get_rng_state().cpu(),)


def drawn_since(earlier: State) -> bool:
    """Whether random numbers were drawn since :func:`state` returned ``earlier``."""
    return not all(map(torch.equal, earlier, state()))
