"""Each document by itself, for functions that know no documents: recurrences, short convolutions.

A batch is cut into its documents, and documents of like length run side by side, padded on the right, which a function
that only looks back does not see. A row that is one document needs no cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.documents import Documents

MOST_PADDING = 16
"""Times the tokens of a batch, beyond which documents that must run at once are refused."""


@dataclass(frozen=True)
class Batch:
    """Documents that run side by side.

    Attributes:
        count, length: documents, and tokens of the longest.
        tokens: where their tokens are in the flat batch [B * S], int64 [n].
        slots: where they go in [count * length], int64 [n].
    """

    count: int
    length: int
    tokens: torch.Tensor
    slots: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] to [count, length, ...]; zeros behind each document."""
        out = x.new_zeros((self.count * self.length, *x.shape[2:]))
        return out.index_copy(0, self.slots, x.flatten(0, 1).index_select(0, self.tokens)).unflatten(
            0, (self.count, self.length)
        )


@dataclass(frozen=True)
class PerDocument:
    """How to run each document by itself.

    Attributes:
        batches: the documents, each once; None where rows can run as they are.
    """

    batches: tuple[Batch, ...] | None

    @staticmethod
    def of(documents: Documents, seq_len: int, device: torch.device | str, single_call: bool = False) -> "PerDocument":
        """How the documents of a batch run.

        Args:
            documents: of the batch.
            seq_len: S.
            device: where the batch is.
            single_call: all documents in one batch. Otherwise lengths of one batch differ by less than a factor of two, so
                that padding is less than half, and there are at most log2(S) + 1 batches.

        Raises:
            BatchError: at once they would be mostly padding.
        """
        if all(len(lines) <= 1 and not lines[:, :1].any() for lines in documents.ranges):
            return PerDocument(None)  # what stands behind a row's only document is padding that it does not see
        groups = [[*documents.each()]] if single_call else documents.by_length()
        if single_call:
            longest = max(len(each.tokens) for each in groups[0])
            padded, actual = len(groups[0]) * longest, len(documents.ranges) * seq_len
            if padded > MOST_PADDING * actual:
                raise BatchError(
                    f"a layer of this model runs all {len(groups[0])} documents at once, padded to the longest: {padded} tokens "
                    f"for the {actual} of the batch. Pack documents of like length, or fewer per row."
                )
        return PerDocument(
            tuple(_batch([each.row * seq_len + each.tokens for each in group], device) for group in groups)
        )

    def run(self, function: Callable[..., Sequence[torch.Tensor]], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call a function that looks back only, on documents instead of rows.

        Args:
            function: [n, m, ...] each, to some of [n, m, ...].
            tensors: [B, S, ...] each.

        Returns:
            What it returns, [B, S, ...] each; zeros where there is no document.
        """
        if self.batches is None:
            return list(function(*tensors))
        shape, wholes = tensors[0].shape[:2], []
        for batch in self.batches:
            outs = [out.flatten(0, 1) for out in function(*map(batch.take, tensors))]
            wholes = wholes or [out.new_zeros((shape.numel(), *out.shape[1:])) for out in outs]
            wholes = [
                whole.index_copy(0, batch.tokens, out.index_select(0, batch.slots))
                for whole, out in zip(wholes, outs, strict=True)
            ]
        return [whole.unflatten(0, shape) for whole in wholes]


def _batch(documents: list[np.ndarray], device: torch.device | str) -> Batch:
    length = max(map(len, documents))
    slots = np.concatenate([i * length + np.arange(len(tokens)) for i, tokens in enumerate(documents)])
    tokens, slots = (torch.from_numpy(each).to(device) for each in (np.concatenate(documents), slots))
    return Batch(len(documents), length, tokens, slots)
