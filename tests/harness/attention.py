"""Attention on ranks that are threads of one process, and attention of the whole sequence from its definition."""

from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.score import Score
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import schedule
from ds_cp.process_group import Group

KERNELS = ("torch", "reference")
"""Kernels that run on CPUs, which the tests compare with the formulas."""


def visible(documents: list[list[int]], rule) -> torch.Tensor:
    """Dense mask [B, S, S] from document lengths and a band."""
    rows = []
    for lengths in documents:
        name = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        i = torch.arange(len(name))
        distance = i[None, :] - i[:, None]
        rows.append((name[:, None] == name[None, :]) & (distance >= -rule.left) & (distance <= rule.right))
    return torch.stack(rows)


def whole_attention(q, k, v, may_see, scale, softcap=None, bias=0.0, sinks=None, keep=1.0):
    """Softmax attention of the whole sequence; shares no code with ds_cp. `bias`, `keep`: [B, H, S, S]."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~may_see[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (torch.softmax(scores, -1)[..., : k.size(2)] * keep) @ v


def inputs(batch, query_heads, key_heads, length, dim, value_dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(query_heads, dim), (key_heads, dim), (key_heads, value_dim), (query_heads, value_dim)]
    return [torch.randn(batch, heads, length, d, dtype=dtype, generator=generator) for heads, d in shapes]


def block_inputs(heads=(4, 2), m=7, n=9, dims=(16, 16), batch=2, dtype=torch.float64):
    """q, k, v and the output's gradient of one block: `m` queries, `n` keys."""
    generator = torch.Generator().manual_seed(m * 1000 + n)
    shapes = ((heads[0], m, dims[0]), (heads[1], n, dims[0]), (heads[1], n, dims[1]), (heads[0], m, dims[1]))
    return [torch.randn(batch, *shape, dtype=dtype, generator=generator) for shape in shapes]


def packed_steps(documents, rule=CAUSAL, layout=None, rank=0):
    """A rank's schedule for one packed row."""
    length = sum(documents)
    segments = Documents.find(1, length, positions=positions_of([documents])).segments(rule)
    return schedule(segments, layout or Layout(length, 1, 1), rank)


def positions_of(documents):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents]).numpy()


def shared_attention(q, k, v, grad_out, documents, rule, layout, kernel_name, ahead=1, scale=0.3, score=None):
    """Output and gradients of the whole sequence, gathered from all ranks, and the bytes sent. With sinks, their gradient is last."""
    found = Documents.find(q.size(0), q.size(2), positions=positions_of(documents))
    segments = found.segments(rule)
    score = score or Score(scale)

    def rank(group: Group):
        local = [layout.shard(x, 2, group.rank).requires_grad_() for x in (q, k, v)]
        steps = schedule(segments, layout, group.rank)
        owned = [torch.cat([torch.arange(*run) for run in runs]) for runs in layout.ring_runs]
        sinks = None if score.sinks is None else score.sinks.detach().clone().requires_grad_()
        mine = replace(score, sinks=sinks)
        out = attend(
            *local,
            lambda phase: PeerExchange(group, steps, ahead, phase),
            kernels.choose(kernel_name, q, v, mine),
            mine,
            owned.__getitem__,
        )
        out.backward(layout.shard(grad_out, 2, group.rank))
        of_sinks = [] if sinks is None else [sinks.grad]
        return [out.detach(), *(x.grad for x in local)], of_sinks, group.sent

    results = in_process.run(layout.ring, rank, timeout=10)
    index = layout.unshard_index
    whole = [torch.cat(parts, dim=2).index_select(2, index) for parts in zip(*(result for result, *_ in results))]
    whole += [sum(parts) for parts in zip(*(sinks for _, sinks, _ in results))]
    return whole, [sent for *_, sent in results]


def one_process(q, k, v, grad_out, documents, rule, scale=0.3, may_see=None, sinks=None, **rules):
    """Output and gradients of the whole sequence from the definition of attention."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    may_see = visible(documents, rule) if may_see is None else may_see
    out = whole_attention(q, k, v, may_see, scale, sinks=sinks, **rules)
    out.backward(grad_out)
    return [out.detach(), q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])]


def assert_equal(got, want, tolerance):
    everything = torch.stack([b.norm() for b in want]).norm()  # the scale of a gradient that is exactly zero
    for name, a, b in zip(("out", "dq", "dk", "dv", "d sinks"), got, want, strict=False):
        assert (a - b).norm() <= tolerance * max(b.norm(), 1e-3 * everything), f"{name}: {(a - b).norm():.1e}"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
