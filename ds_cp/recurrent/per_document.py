"""Runs a function on each document separately. For functions that do not know documents: recurrences, short convolutions.

A batch is split into its documents, and documents of similar length run in one batch, padded on the right. A causal function,
whose output at a token depends on earlier tokens only, is not affected by that padding. Rows that are one document run as they
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
import torch

from ds_cp.agreement import BatchError
from ds_cp.mask.documents import Documents

MAX_PADDED_RATIO = 16
"""Documents that must run in one batch are refused if, padded, they have more than this many times the tokens of the batch."""


@dataclass(frozen=True)
class DocumentBatch:
    """Documents that run in one batch, padded to the longest.

    Attributes:
        count: Number of documents.
        length: Number of tokens of the longest.
        source: int64 [n], index of each token in the flattened batch [B * S].
        target: int64 [n], index of each token in the flattened padded documents [count * length].
    """

    count: int
    length: int
    source: torch.Tensor
    target: torch.Tensor

    @staticmethod
    def of(documents: Sequence[np.ndarray], device: torch.device | str) -> "DocumentBatch":
        """A batch of documents, each given as the indices of its tokens in the flattened batch."""
        length = max(map(len, documents))
        source = np.concatenate(documents)
        target = np.concatenate([i * length + np.arange(len(tokens)) for i, tokens in enumerate(documents)])
        return DocumentBatch(
            len(documents), length, torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        )

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] to [count, length, ...], with zeros after each document."""
        padded = x.new_zeros((self.count * self.length, *x.shape[2:]))
        padded = padded.index_copy(0, self.target, x.flatten(0, 1).index_select(0, self.source))
        return padded.view(self.count, self.length, *x.shape[2:])


@dataclass(frozen=True)
class PerDocument:
    """How a batch runs document by document.

    Attributes:
        batches: The documents, each in one of the batches. None if the rows of the batch can run as they are.
    """

    batches: tuple[DocumentBatch, ...] | None

    @staticmethod
    def of(documents: Documents, seq_len: int, device: torch.device | str, single_call: bool = False) -> "PerDocument":
        """Plan the runs of a batch's documents.

        Args:
            documents: The documents.
            seq_len: S.
            device: Device of the batch.
            single_call: Whether all documents run in one batch. Otherwise lengths within a batch differ by less than a factor
                of two, so that less than half of it is padding, and there are at most log2(S) + 1 batches.

        Raises:
            BatchError: All documents in one batch would be mostly padding.
        """
        # If each row is one document from position 0 on, only padding follows it, which does not affect it.
        if all(len(lines) <= 1 and not lines[:, :1].any() for lines in documents.ranges):
            return PerDocument(None)
        buckets = [[*documents.each()]] if single_call else documents.by_length()
        if single_call:
            longest = max(len(document.tokens) for document in buckets[0])
            padded, actual = len(buckets[0]) * longest, len(documents.ranges) * seq_len
            if padded > MAX_PADDED_RATIO * actual:
                raise BatchError(
                    f"a layer of this model runs all {len(buckets[0])} documents at once, padded to the longest: {padded} tokens "
                    f"for the {actual} of the batch. Pack documents of like length, or fewer per row."
                )
        indices = ([document.row * seq_len + document.tokens for document in bucket] for bucket in buckets)
        return PerDocument(tuple(DocumentBatch.of(bucket, device) for bucket in indices))

    def run(self, function: Callable[..., Sequence[torch.Tensor]], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call a causal function on documents in place of rows.

        Args:
            function: Maps tensors [n, m, ...], n documents of at most m tokens, to several tensors [n, m, ...].
            tensors: [B, S, ...] each.

        Returns:
            The function's results, [B, S, ...] each, with zeros for tokens that belong to no document.
        """
        if self.batches is None:
            return list(function(*tensors))
        shape = tensors[0].shape[:2]
        results: list[torch.Tensor] = []
        for batch in self.batches:
            outs = [out.flatten(0, 1) for out in function(*map(batch.pad, tensors))]
            results = results or [out.new_zeros((shape.numel(), *out.shape[1:])) for out in outs]
            results = [
                result.index_copy(0, batch.source, out.index_select(0, batch.target))
                for result, out in zip(results, outs, strict=True)
            ]
        return [result.view(*shape, *result.shape[1:]) for result in results]
