"""What the dispatcher, meta functions and C++ argument parsers let pass, and a card does not, or not as it was meant."""

from __future__ import annotations

import re
import sys
from typing import Any, Callable, Mapping

import torch
from rehearsal import values

STAGED = 64 << 10
"""Bytes up to which CUDA copies from pageable host memory without making the host wait for the card."""

HALF = (torch.float16, torch.bfloat16)

PRODUCTS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "mm": (("self", "mat2"), None),
    "bmm": (("self", "mat2"), None),
    "mv": (("self", "vec"), None),
    "dot": (("self", "tensor"), None),
    "addmm": (("mat1", "mat2"), "self"),
    "addmm_": (("mat1", "mat2"), "self"),
    "baddbmm": (("batch1", "batch2"), "self"),
    "baddbmm_": (("batch1", "batch2"), "self"),
    "addbmm": (("batch1", "batch2"), "self"),
    "addmv": (("mat", "vec"), "self"),
    "addmv_": (("mat", "vec"), "self"),
    "_grouped_mm": (("self", "mat2"), None),
}
"""The factors and the sum of each matrix product; meta functions compare no dtypes of a sum."""


def product(tape: Any, name: str, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Both factors, the sum and the result of a product have one dtype; or ``out_dtype`` is fp32, and so are the last two."""
    if name not in PRODUCTS:
        return
    factors, sum_name = PRODUCTS[name]
    names = [sum_name, *factors] if sum_name else [*factors]
    given = dict(zip(names, args)) | kwargs
    named = {key: given[key].dtype for key in (*factors, sum_name, "out") if isinstance(given.get(key), torch.Tensor)}
    asked = given.get("out_dtype") or next((arg for arg in args[len(names) :] if isinstance(arg, torch.dtype)), None)
    of_factors = {named[factor] for factor in factors}
    of_sum = {named[key] for key in (sum_name, "out") if key in named}
    allowed = of_factors if asked is None else {asked}
    if len(of_factors) > 1 or not of_sum <= allowed:
        tape.fault("dtype", f"{name} of {_said(named)}" + (f" with out_dtype {asked}" if asked else ""))
    elif asked is not None and asked not in of_factors and not (asked == torch.float32 and of_factors <= set(HALF)):
        tape.fault("dtype", f"{name} with out_dtype {asked} of {_said(named)}")
    elif asked is not None and sum_name and not torch.__version__ >= "2.10":
        tape.fault("dtype", f"{name} with out_dtype adds to a sum from torch 2.10 on, this is {torch.__version__}")


def _said(named: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{key} {str(dtype).removeprefix('torch.')}" for key, dtype in named.items())


# ---- private operations -------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda x: type(x) is int,
    "SymInt": lambda x: type(x) is int,
    "bool": lambda x: type(x) is bool,
    "float": lambda x: type(x) is float,
    "Tensor": lambda x: isinstance(x, torch.Tensor),
}
"""Exactly: to Python True is 1, and the dispatcher takes 0 for a float and True for an int."""

NOT_A_CALLER = re.compile(r"/torch/|/rehearsal/(?!mistakes)")


def private_call(tape: Any, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Compare a call of a private operation with the schema of the installed torch, before anything is converted."""
    overload = getattr(func, "default", func)
    schema = getattr(overload, "_schema", None)
    if schema is None or not schema.name.startswith("aten::_") or NOT_A_CALLER.search(_caller()):
        return
    short = schema.name.removeprefix("aten::")
    if len(args) > len(schema.arguments):
        tape.fault("arguments", f"{short} takes {len(schema.arguments)} arguments")
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args)} | dict(kwargs)
    right = True
    for argument in schema.arguments:
        if argument.name not in given:
            continue
        value, kind = given[argument.name], str(argument.real_type)
        optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
        if kind not in KINDS or (value is None and (optional or argument.name in ABSENT)):
            continue
        if not KINDS[kind](value):
            right = False
            tape.fault("arguments", f"{short}: {argument.name} is a {type(value).__name__}, the schema says {kind}")
    if short in FLASH and right:
        tape.calls[short] += 1
        for problem in flash_problems(given):
            tape.fault("arguments", f"{short}: {problem}")


def _caller() -> str:
    """The file in which an operation is called; the recorder itself calls each one once more."""
    frame = sys._getframe(3)
    while frame.f_code.co_filename.endswith("/torch/_ops.py") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


FLASH = frozenset({"_flash_attention_forward", "_flash_attention_backward"})
ABSENT = frozenset({"cum_seq_q", "cum_seq_k"})
"""Tensors of the backward operation that are not optional, where None arrives as the undefined tensor."""


def flash_problems(given: Mapping[str, Any]) -> list[str]:
    """What the values of one call of torch's FlashAttention say about each other."""
    q, k = given["query"], given["key"]
    lengths = (given["cum_seq_q"], given["max_q"], q), (given["cum_seq_k"], given["max_k"], k)
    window = given.get("window_size_left"), given.get("window_size_right")
    says = [
        (q.dtype in HALF, f"it has no kernel for {q.dtype}"),
        ({given[name].dtype for name in ("query", "key", "value", "out", "grad_out") if name in given} == {q.dtype},
         "query, key, value, out and grad_out differ in dtype"),
        (given["dropout_p"] == 0.0, "dropout would draw from a generator of its own"),
        (not given.get("return_debug_mask", False), "return_debug_mask is for tests"),
        (not given["is_causal"] or (window[0] in (None, -1) and window[1] in (None, -1, 0)),
         f"is_causal with the window {window}"),
        ("logsumexp" not in given or given["logsumexp"].dtype == torch.float32, "logsumexp is not in fp32"),
        (all(x.stride(-1) == 1 for x in (q, k, given["value"])), "the last dim is not contiguous"),
        (q.size(-2) % k.size(-2) == 0, "query heads are no multiple of key heads"),
    ]  # fmt: skip
    problems = [text for right, text in says if not right]
    for cumulated, longest, rows in lengths:
        problems += varlen_problems(cumulated, longest, rows)
    return problems


def varlen_problems(cumulated: torch.Tensor | None, longest: int, rows: torch.Tensor) -> list[str]:
    """What cumulated lengths say about the rows that they divide; None for a dense call."""
    if cumulated is None:
        dense = rows.dim() == 4 and (longest is None or longest == rows.size(1))
        return [] if dense else [f"without cumulated lengths, {tuple(rows.shape)} and a longest of {longest}"]
    problems = [] if cumulated.dtype == torch.int32 else [f"cumulated lengths are {cumulated.dtype}"]
    problems += [] if cumulated.device == rows.device else [f"cumulated lengths are on {cumulated.device}"]
    value = values.value_of(cumulated)
    if value is None:
        return [*problems, "cumulated lengths are unknown"]
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        ends = value.tolist()
    if rows.dim() != 3 or ends[0] != 0 or ends[-1] != rows.size(0):
        problems.append(f"cumulated lengths end at {ends[-1]}, the rows are {tuple(rows.shape)}")
    if max(b - a for a, b in zip(ends, ends[1:])) != longest:
        problems.append(f"the longest is said to be {longest}, the lengths say otherwise")
    return problems


# ---- messages -----------------------------------------------------------------------------------------------


def group_name(args: tuple, kwargs: Mapping[str, Any]) -> str:
    """The name of the process group in the arguments of a c10d operation."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return torch.distributed.ProcessGroup.unbox(arg).group_name
    return ""
