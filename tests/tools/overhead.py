"""What ds_cp costs per layer beside kernel and messages: `python tests/tools/overhead.py [length]`.

A layer's attention alternates with the same calls of the same kernel and the same messages in the same order, written
straight with torch: what one run of ds_cp asked of them is recorded, then replayed. The difference is ds_cp with all that
it needs of autograd, and with caches that are cold behind each wait. In a third run kernel and messages are nothing, which
leaves ds_cp alone. Medians over many rounds on each rank, of the calling thread's CPU time and of wall time.
"""

import statistics
import sys
import time
from contextlib import contextmanager

import torch

from ds_cp.attention.kernels import torch_flash
from ds_cp.cli.ranks import run_on_ranks

CALLS = 600


class Recorder:
    """Calls of the kernel and messages, as functions that repeat them."""

    def __init__(self):
        self.calls, self._works, self._results = [], {}, []

    def replay(self):
        for call in self.calls:
            call()

    def of_kernel(self, function):
        def recorded(*args):
            self.calls.append(lambda: function(*args))
            self._results.append(function(*args))
            return self._results[-1]

        return recorded

    def of_messages(self, ops):
        def start(op):
            call = torch.distributed.isend if op.op is torch.distributed.isend else torch.distributed.irecv
            self._works[id(op)] = call(op.tensor, op.peer, op.group)

        def waiting(op):
            start(op)
            work, wait = self._works[id(op)], lambda: self._works.pop(id(op)).wait()
            return type("Waited", (), {"wait": lambda _: (self.calls.append(wait), work.wait())})()

        self.calls += [lambda op=op: start(op) for op in ops]
        return [waiting(op) for op in ops]

    def of_collective(self, *args, **kwargs):
        exchange = self._all_to_all
        self.calls.append(lambda: exchange(*args, **kwargs))
        return exchange(*args, **kwargs)

    def record(self, run):
        """Run, and keep what it calls: (what repeats the calls, what runs without them)."""
        self._all_to_all = torch.distributed.all_to_all_single
        kernels = [self.of_kernel(getattr(torch_flash, name)) for name in ("_forward_cpu", "_backward_cpu")]
        with replaced(*kernels, self.of_messages, self.of_collective):
            run()
        assert self.calls, "nothing was recorded"

        def alone():
            results = iter(self._results)
            nothing = [lambda *args, **kwargs: next(results)] * 2 + [lambda *args, **kwargs: ()] * 2
            with replaced(*nothing):
                start = clocks()
                run()
                return since(start)

        return self.replay, alone


@contextmanager
def replaced(*functions):
    places = [(torch_flash, "_forward_cpu"), (torch_flash, "_backward_cpu")]
    places += [(torch.distributed, "batch_isend_irecv"), (torch.distributed, "all_to_all_single")]
    before = [getattr(*place) for place in places]
    for (owner, name), mine in zip(places, functions):
        setattr(owner, name, mine)
    yield
    for (owner, name), theirs in zip(places, before):
        setattr(owner, name, theirs)


def clocks():
    return time.thread_time(), time.perf_counter()


def since(start):
    return [1e3 * (now - then) for now, then in zip(clocks(), start)]


def layer(method, length):
    """A layer's attention, forward, and forward and backward."""
    from ds_cp.attention.score import Score
    from ds_cp.config import read
    from ds_cp.layout import Layout
    from ds_cp.mask.documents import Documents
    from ds_cp.mask.rules import CAUSAL
    from ds_cp.mesh import build
    from ds_cp.planner import ModelFacts, resolve
    from ds_cp.region import Region

    plan = resolve(read({"size": 2, "method": method}), ModelFacts("tool", ((8, 2),)), 2, "cpu")
    layout = Layout(2 * length, plan.ring, plan.ulysses, plan.layout)
    region = Region(plan, build(plan.ring, plan.ulysses, plan.timeout), layout, Documents.find(1, 2 * length))
    q, k, v, grad = (torch.randn(1, length, heads, 64).transpose(1, 2) for heads in (8, 2, 2, 8))
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def forward():
        return region.attend(q, k, v, CAUSAL, Score(0.125))

    return {"forward": forward, "forward and backward": lambda: forward().backward(grad)}


def measure(length, calls=CALLS):
    rows = []
    for method in ("ring", "ulysses"):
        for what, mine in layer(method, length).items():
            mine()
            bare, alone = Recorder().record(mine)

            def timed(run):
                start = clocks()
                run()
                return since(start)

            rounds = [(timed(mine), timed(bare)) for _ in range(calls)]
            rounds = list(zip(*rounds)) + [[alone() for _ in range(calls)]]
            rows.append((method, what, *([statistics.median(column) for column in zip(*times)] for times in rounds)))
    return rows


if __name__ == "__main__":
    for rows in zip(*run_on_ranks(2, measure, int((sys.argv[1:] or [64])[0]))):
        mine, bare, alone = ([statistics.mean(column) for column in zip(*of)] for of in list(zip(*rows))[2:])
        print(
            f"{rows[0][0]:8} {rows[0][1]:21} CPU {mine[0] - bare[0]:.3f} ms ({mine[0]:.3f} - {bare[0]:.3f}), "
            f"wall {mine[1] - bare[1]:.3f} ms ({mine[1]:.3f} - {bare[1]:.3f}); "
            f"kernel and messages nothing: {alone[0]:.3f} ms"
        )
