"""What a layer's attention costs beside the kernel and the messages: `python tests/tools/overhead.py [length]`.

CPU time of the calling thread at a small length, the fastest tenth of many calls: other work on the machine makes the rest slower.
"""

import statistics
import sys
import time

import torch

from ds_cp.cli.ranks import run_on_ranks

CALLS = 400


class Clock:
    """Time inside some methods, taken out of what runs around them."""

    def __init__(self):
        self.inside = 0.0

    def watch(self, owner, name):
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - start

        setattr(owner, name, timed)


def measure(length):
    from ds_cp.attention.kernels.torch_flash import TorchKernel
    from ds_cp.attention.score import Score
    from ds_cp.config import read
    from ds_cp.documents import Documents
    from ds_cp.layout import Layout
    from ds_cp.mesh import Group, Pending, build
    from ds_cp.planner import ModelFacts, resolve
    from ds_cp.region import Region
    from ds_cp.rules import CAUSAL

    clock = Clock()
    for owner, names in ((TorchKernel, ("forward", "backward")), (Group, ("swap", "all_to_all")), (Pending, ("wait",))):
        for name in names:
            clock.watch(owner, name)
    rows = []
    for method in ("ring", "ulysses"):
        plan = resolve(read({"size": 2, "method": method}), ModelFacts("tool", ((8, 2),)), 2, "cpu")
        layout = Layout(2 * length, plan.ring, plan.ulysses, plan.layout)
        region = Region(plan, build(plan.ring, plan.ulysses, plan.timeout), layout, Documents.find(1, 2 * length))
        q, k, v, grad = (torch.randn(1, length, heads, 64).transpose(1, 2) for heads in (8, 2, 2, 8))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        for what, backward in (("forward", False), ("forward and backward", True)):
            own, all_of_it = [], []
            for _ in range(CALLS):
                clock.inside, start = 0.0, time.thread_time()
                out = region.attend(q, k, v, CAUSAL, Score(0.125))
                if backward:
                    out.backward(grad)
                all_of_it.append(time.thread_time() - start)
                own.append(all_of_it[-1] - clock.inside)
            rows.append((method, what, *(1e3 * statistics.quantiles(times, n=10)[0] for times in (own, all_of_it))))
    return rows


if __name__ == "__main__":
    for method, what, own, whole in run_on_ranks(2, measure, int((sys.argv[1:] or [64])[0]))[0]:
        print(f"{method:8} {what:21} {own:.3f} ms of {whole:.3f} ms beside kernel and messages")
