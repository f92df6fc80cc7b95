"""The longest rows that one card trains: the last part of measure.py."""

from __future__ import annotations

import gc
import time
from typing import Any, Iterator, Sequence

import torch

from ds_cp.cli.bench.shape import TrainShape

MODES = {
    "plain": None,
    "ds_cp": {"offload_activations": True},
    "ds_cp, layers in tiles": {"offload_activations": True, "offload_kv": True},
}
"""How the 1B model runs; gradient checkpointing always."""


def longest(
    model: dict[str, int], rows: Sequence[int], device: str, tflops: float, until: float
) -> Iterator[dict[str, Any]]:
    """A line for each row that was trained, shortest first: peak memory, and what the line through the last two peaks promises."""
    for i, (mode, asked) in enumerate(MODES.items()):
        start, peaks, took = time.perf_counter(), [], 0.0
        end = start + (until - start) / (len(MODES) - i)
        for tokens in rows:
            if peaks and 4.5 * took > end - time.perf_counter():  # twice the row takes up to four times as long
                break
            try:
                took, peak, loss = train(TrainShape(tokens, **model), asked, device)
            except torch.OutOfMemoryError:
                yield {"mode": mode, "tokens": tokens, "verdict": "out of memory"}
                break
            peaks.append((tokens, peak))
            flops = TrainShape(tokens, **model).flops() / took / 1e12
            line = {"mode": mode, "tokens": tokens, "verdict": f"loss {loss:.3f}", "s": took, "peak GiB": peak / 2**30}
            yield line | {
                "TFLOP/s": flops,
                "of matmul rate": flops / tflops,
                "longest by memory": _promise(peaks, device),
            }


def _promise(peaks: list[tuple[int, float]], device: str) -> int | None:
    if device != "cuda" or len(peaks) < 2:
        return None
    (a, low), (b, high) = peaks[-2:]
    room = torch.cuda.get_device_properties(0).total_memory - high
    return int(b + room * (b - a) / max(high - low, 1))


def train(shape: TrainShape, asked: dict[str, Any] | None, device: str) -> tuple[float, float, float]:
    """(seconds, peak bytes, loss) of a step of AdamW in bf16 on one row, after a short one that makes its state."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if asked is not None:
        from ds_cp.config import read
        from ds_cp.patches.transformers import attach

        attach.attach(model, read({"size": 1, "method": "ring"} | asked))
    adam, loss = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False), None
    try:
        for tokens in (min(64, shape.seq_len), shape.seq_len):
            batch = {name: x[:, :tokens].to(device) for name, x in shape.batch().items()}
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            adam.step()
            adam.zero_grad()
            loss = loss.item()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() if device == "cuda" else 0.0, loss
    finally:
        del model, adam
        gc.collect()
        torch.cuda.empty_cache() if device == "cuda" else None
