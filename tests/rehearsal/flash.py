"""FlashAttention 2, 3 and 4 for fake tensors: packages to import, with the real signatures, that check what they are given.

Results have the right shapes and dtypes. Signatures come from ``tests/data/flash_signatures.json``; where the package
registers a torch operator, so does the stand-in, and the operator's schema checks the arguments as well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch
from rehearsal import checks

from harness.flash_stand_in import SIGNATURES

PACKAGES = {
    "flash_attention_2": ("flash_attn/flash_attn_interface.py", "flash_attn"),
    "flash_attention_3": ("flash_attn_interface.py", None),
    "flash_attention_4": ("flash_attn/cute/interface.py", "flash_attn_4"),
}
"""The module that holds the private functions, and the name of the distribution."""

report: Callable[[str], None] = lambda problem: None  # noqa: E731
"""Called with what is wrong with a call; the scenario puts the tape's fault here."""

library = torch.library.Library("rehearsal", "DEF")
library.define("flash(Tensor[] reads, Tensor(a!)[] writes, str name) -> ()")
library.impl("flash", lambda reads, writes, name: None, "Meta")


def install(kernel: str, version: str, folder: Path) -> None:
    """Put an importable package of a version at the front of ``sys.path``."""
    file, distribution = PACKAGES[kernel]
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        if parent == folder:
            break
        (parent / "__init__.py").touch()
    path.write_text(
        "from rehearsal import flash\n\n"
        f"globals().update(flash.functions({kernel!r}, {version!r}))\n"
    )  # fmt: skip
    if distribution:
        number = version.removeprefix("hopper ")
        information = folder / f"{distribution}-{number}.dist-info"
        information.mkdir()
        name = distribution.replace("_", "-")
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    sys.path.insert(0, str(folder))


def functions(kernel: str, version: str) -> dict[str, Callable[..., Any]]:
    """The private functions of a version by name."""
    return {name: _function(kernel, version, name, said) for name, said in SIGNATURES[kernel][version].items()}


def _function(kernel: str, version: str, name: str, signature: dict[str, Any]) -> Callable[..., Any]:
    def body(arguments: dict[str, Any]) -> Any:
        return _call(kernel, version, name, signature, arguments)

    parameters = signature["parameters"]
    for word in ("BlockSparseTensorsTorch", "SchedulerMetadataTensorsTorch"):
        parameters = parameters.replace(word, "object")
    returns = f" -> {signature['annotation']}" if "annotation" in signature else ""
    names = {"torch": torch, "Optional": Optional, "Tuple": tuple, "Callable": Callable, "_body": body}
    exec(f"def {name}({parameters}){returns}:\n    return _body(dict(locals()))", names)
    if not signature.get("custom_op"):
        return names[name]
    label = f"rehearsal_flash::{name.strip('_')}_{kernel}_{''.join(c if c.isalnum() else '_' for c in version)}"
    operator = torch.library.custom_op(label, names[name], mutates_args=tuple(signature["mutates"]))
    operator.register_fake(names[name])
    return operator


def _call(kernel: str, version: str, name: str, signature: dict[str, Any], arguments: dict[str, Any]) -> Any:
    for problem in problems(kernel, arguments):
        report(f"{kernel} {version}, {name}: {problem}")
    q, k, v = (arguments[each] for each in "qkv")
    reads = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    if "dout" in arguments:
        made = {each: arguments[each] for each in ("dq", "dk", "dv")}
        spare = q.new_empty(q.shape[:-1], dtype=torch.float32)
    else:
        lengths, heads = arguments.get("cu_seqlens_q"), q.size(-2)
        if lengths is None:
            shape = (q.size(0), heads, q.size(1))
        elif kernel == "flash_attention_2" and version.startswith("2.5"):
            shape = (len(lengths) - 1, heads, arguments["max_seqlen_q"])
        else:
            shape = (heads, q.size(0))
        out, lse = q.new_empty((*q.shape[:-1], v.size(-1))), q.new_empty(shape, dtype=torch.float32)
        made, spare = {"out": out, "softmax_lse": lse, "lse": lse}, q.new_empty(0)
    if not signature.get("custom_op"):
        torch.ops.rehearsal.flash([t for t in reads if t.numel()], [*made.values()], f"{kernel} {name}")
        returned = [made.get(each, spare) for each in signature["returns"]]
    else:  # an operator returns no tensor twice, and none that it was given
        new = {} if "dout" in arguments else {**made, "softmax_lse": made["lse"]}
        returned = [new.pop(each) if each in new else torch.empty_like(spare) for each in signature["returns"]]
    return returned[0] if len(returned) == 1 else tuple(returned)


def problems(kernel: str, arguments: dict[str, Any]) -> list[str]:
    """What a package would refuse, or take for something else."""
    q, k, v = (arguments[each] for each in "qkv")
    found = _kinds(kernel, arguments)
    tensors = {name: x for name, x in arguments.items() if name in (*"qkv", "out", "dout", "dq", "dk", "dv")}
    tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    found += [f"{name} is {x.dtype}" for name, x in tensors.items() if x.dtype not in checks.HALF or x.dtype != q.dtype]
    found += [f"the last dim of {name} is not contiguous" for name, x in tensors.items() if x.stride(-1) != 1]
    for name, x in tensors.items():
        rows = (stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1)
        if x.storage_offset() % 8 or any(stride % 8 for stride in rows):
            found.append(f"rows of {name} do not start on 16 bytes")
    widths = {q.size(-1), v.size(-1)}
    if any(width % 8 for width in widths) or (len(widths) > 1 and widths != {192, 128}):
        found.append(f"head dims {sorted(widths)}")
    if q.size(-2) % k.size(-2):
        found.append(f"{q.size(-2)} query heads, {k.size(-2)} key heads")
    lse = arguments.get("softmax_lse", arguments.get("lse"))
    if isinstance(lse, torch.Tensor) and (lse.dtype != torch.float32 or not lse.is_contiguous()):
        found.append(f"lse is {lse.dtype}, contiguous {lse.is_contiguous()}")
    for cumulated, longest, rows in (("cu_seqlens_q", "max_seqlen_q", q), ("cu_seqlens_k", "max_seqlen_k", k)):
        found += checks.varlen_problems(arguments.get(cumulated), arguments.get(longest), rows)
    return found


def _kinds(kernel: str, arguments: dict[str, Any]) -> list[str]:
    """Arguments of another type than the function means; Python would take True for 1 and a float for a size."""
    fours = kernel == "flash_attention_4"
    edges: Sequence[Any] = arguments.get("window_size") or (
        arguments.get("window_size_left"),
        arguments.get("window_size_right"),
    )
    checked = {
        "softmax_scale": float, "dropout_p": float, "causal": bool, "is_causal": bool, "deterministic": bool,
        "return_softmax": bool, "return_lse": bool, "softcap": float,
    }  # fmt: skip
    found = [
        f"{name} is a {type(arguments[name]).__name__}"
        for name, kind in checked.items()
        if name in arguments and type(arguments[name]) is not kind and not (fours and arguments[name] is None)
    ]
    found += [
        f"an edge of the window is {edge!r}" for edge in edges if type(edge) is not int and not (fours and edge is None)
    ]
    if fours and any(edge is not None and edge < 0 for edge in edges):
        found.append(f"the window {edges}, where open edges are None")
    causal = arguments.get("is_causal", arguments.get("causal"))
    if causal and (edges[0] not in (None, -1) or edges[1] not in (None, -1, 0)):
        found.append(f"causal with the window {edges}")
    return found
