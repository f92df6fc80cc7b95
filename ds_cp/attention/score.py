"""What happens to q k^T between the product and the softmax, as data for the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A layer's score rule.

    Attributes:
        scale: factor on q k^T.
    """

    scale: float
