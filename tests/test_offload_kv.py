"""Layers in tiles of tokens with K and V in host memory: exact for every method and mask, and the device holds blocks."""

import contextlib
from contextlib import contextmanager

import pytest
import torch

from ds_cp.cli.bench.probes import LiveStorages
from harness import batches, subject
from harness.batches import BatchSpec
from harness.cases import config_of, name_of
from harness.models import HEAD_DIM, TYPES_WITHOUT_KV_HEADS, ModelSpec
from harness.oracle import truth
from harness.pairwise import covering

FACTORS = {
    "way": [("ring", 2), ("ring", 3), ("ulysses", 2), ("hybrid", 4)],
    "layout": ["zigzag", "contiguous", "auto"],
    "type": ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"],
    "kind": ["dense", "packed", "right_pad", "left_pad"],
    "shape": [(1, 150), (3, 37)],
    "block": [7, 16, 64],
    "checkpointing": [None, "reentrant", "non-reentrant"],
    "memory": [(), ("recompute_attention",), ("offload_activations",)],
    "dtype": [torch.float32, torch.float64],
}
CONSTRAINTS = [
    # the gradient of gpt_oss's router bias cancels: fp32 leaves 1e-5 of it without tiles, too
    (("type", "dtype"), lambda type, dtype: type != "gpt_oss" or dtype == torch.float64),
]
CASES = covering(FACTORS, CONSTRAINTS)


@contextmanager
def double_inside_of_tiles(dtype):
    """A mode of torch functions does not reach into an autograd function, where the layers run."""
    from ds_cp import tiled_layer

    on = tiled_layer._Layer._on

    @contextmanager
    def in_double(self, span):
        with on(self, span) as span, subject.in_full_precision(dtype):
            yield span

    tiled_layer._Layer._on = in_double
    with contextlib.ExitStack() as done:
        done.callback(setattr, tiled_layer._Layer, "_on", on)
        yield


def in_tiles(*args, dtype, **kwargs):
    with double_inside_of_tiles(dtype):
        return subject.loss_and_gradients(*args, dtype, **kwargs)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tiles_are_exact(workers, case):
    (method, size), dtype = case["way"], case["dtype"]
    spec = ModelSpec(case["type"], kv_heads=8 if case["type"] in TYPES_WITHOUT_KV_HEADS else 2)
    batch = BatchSpec(case["kind"], *case["shape"])
    config = config_of(method, size, case["layout"]) | dict.fromkeys(case["memory"], True)
    config["offload_kv"] = case["block"]
    results = workers(size).run(in_tiles, spec, config, [batch], dtype=dtype, checkpointing=case["checkpointing"])
    subject.check(results, truth(spec, batch), dtype)


class Peak(LiveStorages):
    """The most bytes that lived at any time."""

    most = 0

    def __torch_dispatch__(self, *args):
        found = super().__torch_dispatch__(*args)
        self._seen = {key: storage for key, storage in self._seen.items() if not storage[0].expired()}
        self.most = max(self.most, self.live())
        return found


def on_a_host_of_its_own():
    """Rows and saved tensors that wait in host memory wait in numpy's, which the probe does not see."""
    from ds_cp.attention import offloaded
    from ds_cp.patches.transformers.memory import offload

    class Rows(offloaded.HostRows):
        def __init__(self, shape, dtype, device):
            super().__init__((0,), dtype, device)
            self._rows = torch.zeros(shape, dtype=dtype).numpy()

        def write(self, start, rows):
            self._rows[start : start + len(rows)] = rows.numpy()

        def read(self, start, stop):
            return torch.from_numpy(self._rows[start:stop]).clone()

    offloaded.HostRows = Rows
    offload.to_host = lambda x: x if isinstance(x, torch.nn.Parameter) or x.dim() < 3 else x.detach().numpy().copy()
    offload.from_host = lambda x: x if isinstance(x, torch.Tensor) else torch.from_numpy(x)


def per_token(config, lengths=(256, 512)):
    """Bytes that a token more on this rank costs at the peak of a step."""
    from ds_cp import tiled

    on_a_host_of_its_own()
    tiled.TILE_BYTES = 1 << 12  # the loss is not what this is about
    model = subject.changed_model(ModelSpec("llama"), config).train()
    subject.enable_checkpointing(model, "non-reentrant")
    peaks = []
    for length in lengths:
        inputs = batches.make(BatchSpec("dense", 1, length)).inputs
        model(**inputs).loss.backward()
        with Peak() as storages:
            model(**inputs).loss.backward()
        peaks.append(storages.most)
    return (peaks[1] - peaks[0]) / ((lengths[1] - lengths[0]) // config["size"])


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_token_costs_its_hidden_states(workers, method):
    """What lives of a token at the peak: a layer's input and output, or their gradients, and the row's ids and angles."""
    config = config_of(method, 2) | {"offload_activations": True}
    hidden = 4 * ModelSpec("llama").heads * HEAD_DIM
    whole, tiled = (workers(2).run(per_token, config | extra)[0] for extra in ({}, {"offload_kv": 16}))
    print(whole / hidden, tiled / hidden)
