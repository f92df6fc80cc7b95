"""Time to plan a batch in ms, the fastest of 15 tries: `python tests/tools/planning_time.py`."""

import time

import numpy as np

from ds_cp import balance
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL
from ds_cp.mask.schedule import schedule

RING = 8


def fastest(call, tries=15):
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def positions_of(documents, length):
    """Positions [1, S] of log-normal documents, the largest a quarter of the row."""
    sizes = np.random.default_rng(0).lognormal(0, 1.5, documents)
    sizes = np.maximum(1, (sizes / sizes.sum() * (length - documents)).astype(int))
    sizes[-1] += length - sizes.sum()
    return np.concatenate([np.arange(n) for n in sizes])[None]


def main():
    for documents, length in ((64, 1 << 17), (4096, 1 << 20)):
        positions = positions_of(documents, length)
        found = Documents.find(1, length, positions)
        segments = found.segments(CAUSAL)
        layout = balance.choose(length, RING, 1, "zigzag", "balanced", found)
        figures = {
            "find documents": lambda p=positions, n=length: Documents.find(1, n, p),
            "choose the layout": lambda f=found, n=length: balance.choose(n, RING, 1, "zigzag", "balanced", f),
            "schedule of a rank": lambda s=segments, lay=layout: schedule(s, lay, 0),
        }
        print(f"{documents} documents, {length} tokens, cp {RING}, {layout.name}:")
        for name, call in figures.items():
            print(f"  {name:20} {fastest(call):6.2f} ms")


if __name__ == "__main__":
    main()
