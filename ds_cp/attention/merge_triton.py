"""The merge of partial attention as one kernel in Triton, which torch's CUDA builds install."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

PART_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WARPS = 4
STEP = WARPS * 32 * 4  # elements of one load of a program: four per thread, which is 128 bits in fp32
LOWEST = tl.constexpr(-3.0e38)
INT32_MAX = 2**31 - 1


# No integer is specialized: one compiled kernel serves all lengths, strides and row slices of a head dim.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["lse", "part_lse", "length", "heads"]
    + [f"{name}_{dim}" for name in ("out", "lse", "part", "part_lse") for dim in ("batch", "head", "row")]
)
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    lse,
    part,
    part_lse,
    length,
    heads,
    out_batch,
    out_head,
    out_row,
    lse_batch,
    lse_head,
    lse_row,
    part_batch,
    part_head,
    part_row,
    part_lse_batch,
    part_lse_head,
    part_lse_row,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merges ``ROWS`` rows of one head.

    The strides of ``out`` and ``part`` are in units of ``UNIT`` elements, from which the compiler infers alignment. Only
    the program's first element is addressed in 64 bits. Neighboring programs are neighboring heads, as in memory.
    """
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) // heads
    head = (tl.program_id(0) - block * heads).to(tl.int64)
    first = (block * ROWS).to(tl.int64)
    out += (batch * out_batch + head * out_head + first * out_row) * UNIT
    part += (batch * part_batch + head * part_head + first * part_row) * UNIT
    lse += batch * lse_batch + head * lse_head + first * lse_row
    part_lse += batch * part_lse_batch + head * part_lse_head + first * part_lse_row

    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    in_length = block * ROWS + rows < length
    out += rows * out_row * UNIT + columns
    part += rows * part_row * UNIT + columns
    lse += rows * lse_row
    a = tl.load(lse, mask=in_length, other=0.0)
    b = tl.load(part_lse + rows * part_lse_row, mask=in_length, other=0.0)
    out_tiles, part_tiles = (), ()
    for start in tl.static_range(0, DIM, COLUMNS):  # all loads before the first store, so that they overlap
        mask = in_length & (start + columns < DIM)
        out_tiles += (tl.load(out + start, mask=mask),)  # type: ignore[assignment]
        part_tiles += (tl.load(part + start, mask=mask),)  # type: ignore[assignment]

    difference = b - tl.where(a == float("-inf"), LOWEST, a)  # with no key on either side -inf - -inf would be NaN
    exponential = tl.exp(-tl.abs(difference))
    larger = 1 / (1 + exponential)
    smaller = exponential * larger
    part_weight = tl.where(difference > 0, larger, smaller)
    out_weight = tl.where(difference > 0, smaller, larger)
    for i in tl.static_range(len(out_tiles)):
        merged = out_tiles[i] * out_weight + part_tiles[i].to(tl.float32) * part_weight
        tl.store(out + i * COLUMNS, merged, mask=in_length & (i * COLUMNS + columns < DIM))
    tl.debug_barrier()  # several threads read the same log-sum-exp, and one of them overwrites it
    tl.store(lse, tl.where(difference > 0, b, a) + tl.log(1 + exponential), mask=in_length)


def supports(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> bool:
    """Whether :func:`merge` computes these tensors: fp32 sums, contiguous head dims, and offsets within 32 bits."""
    if out.dim() != 4 or not out.shape == part.shape or not out.shape[:3] == lse.shape == part_lse.shape:
        return False
    batch, heads, length, dim = out.shape
    rows, _ = _tile(dim)
    return (
        all(x.dtype == torch.float32 for x in (out, lse, part_lse))
        and part.dtype in PART_DTYPES
        and out.device == lse.device == part.device == part_lse.device
        and 0 < dim <= 512
        and out.stride(3) == part.stride(3) == 1
        and batch < 2**16
        and triton.cdiv(length, rows) * heads <= INT32_MAX
        and length <= INT32_MAX - rows
        and all((rows + 1) * x.stride(2) <= INT32_MAX for x in (out, lse, part, part_lse))
    )


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """:func:`~ds_cp.attention.merge.merge_partial_attention` in one launch, for tensors that :func:`supports` accepts."""
    batch, heads, length, dim = out.shape
    if not out.numel():
        return
    rows, columns = _tile(dim)
    out_strides, part_strides = _strides(out), _strides(part)
    unit = math.gcd(4, *out_strides, *part_strides)
    with torch.cuda.device_of(out):
        merge_kernel[triton.cdiv(length, rows) * heads, batch](
            out,
            lse,
            part,
            part_lse,
            length,
            heads,
            *(stride // unit for stride in out_strides),
            *_strides(lse),
            *(stride // unit for stride in part_strides),
            *_strides(part_lse),
            DIM=dim,
            UNIT=unit,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=WARPS,
        )


def _tile(dim: int) -> tuple[int, int]:
    """Rows of a program, and how many of their columns it loads at once: whole 128-byte lines where the head dim allows it."""
    columns = max(16, min(32, dim & -dim))
    return STEP // columns * (1 if dim > 64 else 2), columns


def _strides(x: torch.Tensor) -> list[int]:
    """Strides of batch, heads and rows; 0 for dims of size 1, whose stride may be any number."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride())]
