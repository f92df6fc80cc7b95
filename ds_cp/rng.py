"""Random numbers of the shared part: others on each rank, reproducible, and the outside stream as if nothing had been."""

from __future__ import annotations

import hashlib

import torch
from deepspeed.accelerator import get_accelerator


class ForkedRng:
    """Random numbers inside a region: different per cp rank (each holds other tokens), reproducible, and outside
    as if nothing had happened unless some were drawn; then the outside moves on by one draw, equally on every rank."""

    def __init__(self, rank: int):
        self._saved = state()
        seed = hashlib.blake2b(b"".join(s.numpy().tobytes() for s in self._saved), digest_size=7)
        self.outer_seed = int.from_bytes(seed.digest(), "little")
        seed.update(rank.to_bytes(4, "little"))
        self._seed = int.from_bytes(seed.digest(), "little")
        torch.manual_seed(self._seed)
        self._inside = state()

    def close(self, drawn: bool = False) -> None:
        """Go back to the outside stream; ``drawn`` also when it was from no stream (:meth:`ds_cp.region.Region.seed`)."""
        drawn = drawn or not same(self._inside, state())
        torch.set_rng_state(self._saved[0])
        if len(self._saved) > 1:
            get_accelerator().set_rng_state(self._saved[1])
        if drawn:
            for device in {"cpu", get_accelerator().current_device_name()}:
                torch.rand(1, device=device)

    def close_interrupted(self) -> None:
        """The region was interrupted, and nobody closed it: go back, unless somebody has seeded anew since."""
        if torch.initial_seed() == self._seed:
            self.close(drawn=True)  # ranks were interrupted at different points


def state() -> tuple[torch.Tensor, ...]:
    """Of the CPU's and the device's stream."""
    accelerator = get_accelerator()
    states = (torch.get_rng_state(),)
    return states if accelerator.device_name() == "cpu" else states + (accelerator.get_rng_state().cpu(),)


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    """Whether nothing was drawn between two states."""
    return all(map(torch.equal, one, other))
