"""Named ranges in a profile: ``ds_cp::exchange``, ``ds_cp::all_to_all``, ``ds_cp::kernel``, ``ds_cp::merge`` and others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range ``ds_cp::name`` in the profile that is being recorded, if there is one.

    ``record_function`` alone costs about 9 microseconds on a CPU even while nothing is recorded, and a layer has dozens of
    ranges.
    """
    return record_function(f"ds_cp::{name}") if torch.autograd._profiler_enabled() else _NO_RANGE
