"""Block kernels: every FlashAttention file over a stand-in with the real package's signatures, windows, launches."""

import inspect
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import flash_signatures

from ds_cp.attention import kernels
from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.kernels import available
from ds_cp.attention.kernels.binding import UnknownVersion, bind
from ds_cp.attention.kernels.flash_attention_2 import FlashAttention2
from ds_cp.attention.kernels.reference import ReferenceKernel
from ds_cp.attention.kernels.torch_flash import TorchCudaKernel
from ds_cp.attention.kernels.windows import ALL, fit, launches
from ds_cp.attention.score import Score
from ds_cp.cli.bench import in_process
from ds_cp.config import ConfigError, read
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, Band
from ds_cp.mask.schedule import OPEN, Tile, find_tiles, schedule
from ds_cp.planner import ModelFacts, resolve
from harness.flash_stand_in import SIGNATURES, VERSIONS, make_kernel, stand_in

CPU = torch.device("cpu")
NEWEST = [(kernel, version) for kernel, version in VERSIONS if version in ("2.8.3.post2", "hopper 01afd16", "4.0.0b36")]


def tensors(heads=(4, 2), m=7, n=9, dims=(16, 16), batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(m * 1000 + n)
    shapes = ((heads[0], m, dims[0]), (heads[1], n, dims[0]), (heads[1], n, dims[1]), (heads[0], m, dims[1]))
    return [torch.randn(batch, *shape, dtype=dtype, generator=generator) for shape in shapes]


def shared(kernel, documents, rule, layout, heads=(4, 2), dims=(16, 16), score=Score(0.3)):
    """Output and gradients of all ranks of an in-process ring, and the ranks' work."""
    length = sum(documents)
    q, k, v, grad_out = tensors(heads, length, length, dims, batch=1)
    positions = torch.cat([torch.arange(n) for n in documents]).numpy()[None]
    segments = Documents.find(1, length, positions=positions).segments(rule)

    def rank(group):
        local = [layout.shard(x, 2, group.rank).requires_grad_() for x in (q, k, v)]
        steps = schedule(segments, layout, group.rank)
        assert kernel.takes(local[0], local[2], score)
        out = attend(*local, lambda word: PeerExchange(group, steps, 1, word), kernel, score)
        out.backward(layout.shard(grad_out, 2, group.rank))
        return [out.detach(), *(x.grad for x in local)]

    return [torch.cat(parts, dim=2) for parts in zip(*in_process.run(layout.ring, rank, timeout=20))]


RULES = {
    "causal": CAUSAL,
    "bidirectional": Band(OPEN, OPEN),
    "window": Band(4, 0),
    "window wider than a shard": Band(20, 0),
    "two-sided": Band(3, 2),
    "what a window leaves of causal": Band(OPEN, -5),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kernel, version", VERSIONS)
def test_every_version_of_every_package_equals_the_formulas(kernel, version, rule):
    layout = Layout(37, 2, 1, "zigzag")
    for dims in ((16, 16), (20, 12), (12, 24)):
        arguments = [17, 1, 1, 18], RULES[rule], layout, (4, 2), dims
        got = shared(make_kernel(kernel, version), *arguments)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, shared(ReferenceKernel(), *arguments)):
            assert torch.allclose(a, b, atol=1e-10, rtol=1e-10), (name, dims)


@pytest.mark.parametrize("kernel, version", NEWEST)
def test_softcap_runs_inside_the_kernel(kernel, version):
    arguments = [30, 10], CAUSAL, Layout(40, 2, 1, "zigzag")
    score = Score(0.3, softcap=2.0)
    got = shared(make_kernel(kernel, version), *arguments, score=score)
    for a, b in zip(got, shared(ReferenceKernel(), *arguments, score=score)):
        assert torch.allclose(a, b, atol=1e-10, rtol=1e-10)


def test_a_version_without_softcap_does_not_take_it():
    q, _, v, _ = tensors()
    old = make_kernel("flash_attention_2", "2.5.9.post1")
    assert old.takes(q, v, Score(1.0)) and not old.takes(q, v, Score(1.0, softcap=2.0))


@settings(max_examples=150, deadline=None)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    offset=st.integers(-14, 14),
    left=st.sampled_from([0, 1, 3, 9, OPEN]),
    right=st.sampled_from([0, 2, -2, 7, OPEN]),
    which=st.sampled_from(NEWEST),
)
def test_any_band_is_one_window_or_a_few(m, n, offset, left, right, which):
    """Against the band written out: tiles of any shape, also with many more queries than keys."""
    if left + right < 0:
        return
    segments = Documents.find(1, 40).segments(Band(left, right))
    start = 14
    tiles = find_tiles(segments, ((start + offset, start + offset + m),), ((start, start + n),))
    kernel = make_kernel(*which)
    for tile in tiles:
        q, k, v, grad_out = tensors((2, 1), m, n, (8, 8), batch=1)
        whole = torch.full((m, n), -torch.inf, dtype=q.dtype)
        pieces = list(kernel.lower(tile))
        assert len(pieces) <= 3
        for piece in pieces:
            i = torch.arange(piece.q_stop - piece.q_start).unsqueeze(-1)
            j = torch.arange(piece.k_stop - piece.k_start)
            seen = (j - i >= piece.lo) & (j - i <= piece.hi)
            assert seen.any(1).all() and seen.any(0).all()
            part = whole[piece.q_start : piece.q_stop, piece.k_start : piece.k_stop]
            assert (part[seen] == -torch.inf).all(), "a pair twice"
            part[seen] = 0
            index = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
            a, b, c = q[:, :, index[0]], k[:, :, index[1]], v[:, :, index[1]]
            for mine, formula in zip(
                kernel.forward(a, b, c, *kernel.launches([piece], CPU), Score(0.3)), _formula(a, b, c, seen)
            ):
                assert torch.allclose(mine, formula)
        i, j = torch.arange(m).unsqueeze(-1) + start + offset, torch.arange(n) + start
        band = (j >= i - left) & (j <= i + right)
        assert torch.equal(whole == 0, band)


def _formula(q, k, v, seen):
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_the_stand_in_has_flash_attention_2s_trap_and_the_split_avoids_it():
    """100 queries, 10 keys, causal from the top left: the window (ALL, 90) is taken for open."""
    tile = Tile(0, 1, 0, 100, 0, 10, -OPEN, 0)
    kernel = make_kernel("flash_attention_2", "2.8.3.post2")
    q, k, v, _ = tensors((1, 1), 100, 10, batch=1)
    out, lse = kernel.forward(q, k, v, *kernel.launches([tile], CPU), Score(0.3))
    assert not torch.allclose(lse, ReferenceKernel().forward(q, k, v, tile, Score(0.3))[1])
    assert [piece[2:] for piece in fit(tile)] == [(0, 9, 0, 9, -OPEN, 0), (9, 100, 0, 10, -OPEN, OPEN)]


# --- launches -------------------------------------------------------------------------------------------------------


def packed(documents, rule=CAUSAL, layout=None, rank=0):
    length = sum(documents)
    positions = torch.cat([torch.arange(n) for n in documents]).numpy()[None]
    segments = Documents.find(1, length, positions=positions).segments(rule)
    return schedule(segments, layout or Layout(length, 1, 1), rank)


@pytest.mark.parametrize("rule", [CAUSAL, Band(OPEN, OPEN), Band(6, 0), Band(3, 2)])
def test_a_packed_row_is_one_launch(rule):
    documents = [17, 1, 1, 18, 2, 40]
    (step,) = packed(documents, rule)
    kernel = make_kernel("flash_attention_2", "2.8.3.post2")
    (launch,) = kernels.work(step, kernel, CPU)
    ends = torch.tensor([0, *documents]).cumsum(0)
    assert torch.equal(launch.cu_q, ends.int()) and torch.equal(launch.cu_k, ends.int())
    assert (launch.max_q, launch.max_k) == (40, 40)
    assert kernels.work(step, kernel, CPU) is kernels.work(step, kernel, CPU), "built once per schedule"


def test_windows_of_a_launch_are_the_rules():
    assert [(x.left, x.right) for x in launches(packed([9, 1, 8])[0].tiles, CPU)] == [(ALL, 0)]
    assert [(x.left, x.right) for x in launches(packed([9, 1, 8], Band(3, 0))[0].tiles, CPU)] == [(3, 0)]
    assert [(x.left, x.right) for x in launches(packed([9, 4], Band(OPEN, OPEN))[0].tiles, CPU)] == [(ALL, ALL)]


def test_tiles_with_a_gap_other_windows_or_several_batch_rows_stay_apart():
    causal = [Tile(0, 1, 0, 4, 0, 4, -OPEN, 0), Tile(0, 1, 4, 9, 4, 9, -OPEN, 0)]
    assert len(launches(causal, CPU)) == 1
    assert len(launches([causal[0], causal[1]._replace(q_start=5, k_start=5)], CPU)) == 2
    assert len(launches([causal[0], causal[1]._replace(lo=-2)], CPU)) == 2
    assert len(launches([tile._replace(batch_stop=2) for tile in causal], CPU)) == 2
    assert len(launches(causal, CPU, varlen=False)) == 2


def test_packed_documents_cost_one_call_forward_and_one_backward():
    module = stand_in("flash_attention_2", "2.8.3.post2")
    shared(make_kernel("flash_attention_2", "2.8.3.post2"), [17, 1, 1, 18], CAUSAL, Layout(37, 1, 1))
    assert module.calls == [("_flash_attn_varlen_forward", 4), ("_flash_attn_varlen_backward", 4)]
    module = stand_in("flash_attention_2", "2.5.0")
    shared(make_kernel("flash_attention_2", "2.5.0"), [17, 1, 1, 18], CAUSAL, Layout(37, 1, 1))
    assert [name for name, _ in module.calls] == ["_flash_attn_forward"] * 4 + ["_flash_attn_backward"] * 4


# --- bindings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, version", VERSIONS)
def test_the_bindings_know_every_argument_of_the_recorded_signatures(kernel, version):
    make_kernel(kernel, version)  # a binding that lacks something raises here


def test_a_moved_argument_is_named():
    def newer(q, k, v, softmax_scale, causal, window, /):
        pass

    with pytest.raises(UnknownVersion, match="newer of the installed package asks for window and lacks window_size"):
        bind(newer, ("q", "k", "v", "softmax_scale", "causal"), ("window_size|window_size_left",))


def test_the_cute_module_inside_flash_attn_2_is_refused():
    with pytest.raises(UnknownVersion, match="lacks window_size_left"):
        bind(lambda q, k, v, out, dout, lse, softmax_scale=None, causal=False: None, "qkv", ("window_size_left",))


def test_a_custom_operator_shows_the_signature_of_its_function():
    module = stand_in("flash_attention_2", "2.8.3.post2")
    assert "window_size_left" not in inspect.signature(module._flash_attn_forward).parameters
    FlashAttention2(module)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_packages_still_have_the_recorded_signatures():
    assert flash_signatures.main(["--check"]) == 0


def test_the_aten_pair_has_the_arguments_that_the_torch_kernel_passes():
    forward = torch.ops.aten._flash_attention_forward.default._schema
    backward = torch.ops.aten._flash_attention_backward.default._schema
    assert [a.name for a in forward.arguments][:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert [a.name for a in backward.arguments][:12] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal",
    ]  # fmt: skip
    for schema in (forward, backward):
        assert {"scale", "window_size_left", "window_size_right"} <= {a.name for a in schema.arguments if a.kwarg_only}


@pytest.mark.parametrize("documents", [[24], [10, 3, 11]])
def test_shapes_of_the_torch_kernel_on_cuda_by_meta_tensors(documents):
    """No GPU: torch's own shape functions run the calls; dense and varlen, v wider than q."""
    kernel = TorchCudaKernel()
    q, k, v, grad_out = (x.to("meta", torch.bfloat16) for x in tensors((4, 2), 24, 24, (20, 24), batch=1))
    (launch,) = kernel.launches(packed(documents)[0].tiles, torch.device("meta"))
    out, lse = kernel.forward(q, k, v, launch, Score(0.3))
    assert (out.shape, lse.shape, lse.dtype) == ((1, 4, 24, 24), (1, 4, 24), torch.float32)
    grads = kernel.backward(grad_out, q, k, v, out, lse, launch, Score(0.3))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_blackwells_head_dims():
    kernel = make_kernel("flash_attention_4", "4.0.0b36")
    assert kernel.widths(64, 64) == (64, 64)
    assert kernel.widths(100, 36) == (104, 104)
    assert kernel.widths(192, 128) == (192, 128)
    assert kernel.widths(160, 160) == (256, 256)
    assert not kernel.takes(*(torch.zeros(1, 1, 2, 288),) * 2, Score(1.0))


def test_the_data_file_is_as_the_tool_writes_it():
    assert flash_signatures.DATA.read_text() == json.dumps(SIGNATURES, indent=1, sort_keys=True) + "\n"
    for kernel, source in flash_signatures.SOURCES.items():
        assert set(SIGNATURES[kernel]) == set(source["versions"])


def test_the_tool_reads_arguments_returns_and_operators_out_of_source():
    source = """
@wrapper_of_custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq",), device_types="cuda")
def _flash_attn_backward(dout: torch.Tensor, window_size_left: int = -1) -> torch.Tensor:
    if dout is None:
        return None
    return softmax_d

def _flash_attn_forward(q, k, softmax_scale=None):
    return (out, lse) if softmax_scale else (out, lse, more)
"""
    found = flash_signatures.signatures(source, ("_flash_attn_forward", "_flash_attn_backward"))
    assert found == {
        "_flash_attn_backward": {
            "parameters": "dout: torch.Tensor, window_size_left: int=-1",
            "returns": ["softmax_d"],
            "custom_op": True,
            "annotation": "torch.Tensor",
            "mutates": ["dq"],
        },
        "_flash_attn_forward": {"parameters": "q, k, softmax_scale=None", "returns": ["out", "lse"]},
    }


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """`machine((9, 0), "flash_attention_2", ...)`: a card and the packages that are installed."""

    def pretend(card, *installed, broken=()):
        def make(name):
            if name in broken:
                raise UnknownVersion("f of the installed package lacks q, which ds_cp does not know")

        monkeypatch.setattr(available, "capability", lambda: card)
        monkeypatch.setattr(available, "_installed", lambda p: p in [available.PACKAGES[name] for name in installed])
        monkeypatch.setattr(kernels, "make", make)

    return pretend


def chosen(kernel="auto", device="cuda", head_dims=(128,)):
    plan = resolve(read({"size": 2, "kernel": kernel}), ModelFacts("M", ((8, 8),), head_dims), 8, device)
    return plan.kernel, plan.reasons["kernel"]


ALL_THREE = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

CHOICES = [
    # (card, installed, device) -> (kernel, what the reason says)
    (None, (), "cpu", "torch", "for CPUs"),
    (None, ALL_THREE, "cuda", "torch", "no NVIDIA card"),
    ((10, 0), ALL_THREE, "cuda", "flash_attention_4", "compute capability 10.0"),
    ((9, 0), ALL_THREE, "cuda", "flash_attention_3", "compute capability 9.0"),
    ((8, 0), ALL_THREE, "cuda", "flash_attention_2", "compute capability 8.0"),
    ((10, 0), ("flash_attention_2", "flash_attention_3"), "cuda", "flash_attention_2", "best installed"),
    ((9, 0), ("flash_attention_4",), "cuda", "torch", "no usable package"),
    ((9, 0), (), "cuda", "torch", "that torch ships"),
    ((7, 5), ALL_THREE, "cuda", "torch", "no FlashAttention runs on compute capability 7.5"),
]


@pytest.mark.parametrize("card, installed, device, kernel, why", CHOICES)
def test_auto_takes_the_best_that_the_machine_can_run_and_says_why(machine, card, installed, device, kernel, why):
    machine(card, *installed)
    name, reason = chosen(device=device)
    assert name == kernel and why in reason


def test_auto_passes_over_a_package_of_an_unknown_version_and_names_wide_heads(machine):
    machine((9, 0), *ALL_THREE, broken=("flash_attention_3",))
    assert chosen()[0] == "flash_attention_2"
    assert "layers of head dim 512" in chosen(head_dims=(256, 512))[1]


REFUSED = [
    (None, (), "cpu", "flash_attention_2", 'needs an NVIDIA card and this job runs on "cpu". Use "torch" or "auto"'),
    (
        (9, 0),
        (),
        "cuda",
        "flash_attention_2",
        'flash-attn is not installed here. Install it by "pip install flash-attn',
    ),
    ((9, 0), (), "cuda", "flash_attention_3", 'building it from the folder "hopper"'),
    ((10, 0), (), "cuda", "flash_attention_4", '"pip install flash-attn-4", or use "auto"'),
    (
        (8, 0),
        ALL_THREE,
        "cuda",
        "flash_attention_3",
        r"needs a Hopper card \(compute capability 9\) and this one has 8.0",
    ),
    ((8, 0), ALL_THREE, "cuda", "flash_attention_4", "needs a Blackwell or Hopper card"),
    (None, ALL_THREE, "cuda", "flash_attention_2", "no NVIDIA card is visible here"),
]


@pytest.mark.parametrize("card, installed, device, kernel, sentence", REFUSED)
def test_a_kernel_that_cannot_run_here_is_refused_with_what_to_do(machine, card, installed, device, kernel, sentence):
    machine(card, *installed)
    with pytest.raises(
        ConfigError, match=f'"context_parallel.kernel" is "{kernel}", but .*{sentence}.*Nothing was started'
    ):
        chosen(kernel, device)


def test_an_installed_package_of_an_unknown_version_is_refused_by_name(machine):
    machine((9, 0), *ALL_THREE, broken=("flash_attention_3",))
    with pytest.raises(
        ConfigError, match="cannot be used: f of the installed package lacks q.*Install another version"
    ):
        chosen("flash_attention_3")


@pytest.mark.parametrize("card, takes", [((8, 0), True), ((7, 5), False), (None, False)])
def test_torchs_kernel_leaves_old_cards_to_the_formulas(machine, monkeypatch, card, takes):
    machine(card)
    monkeypatch.setattr(TorchCudaKernel, "device", "meta")
    q = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device="meta")
    assert TorchCudaKernel().takes(q, q, Score(1.0)) is takes


def test_this_machine_has_none_of_the_packages_and_the_real_checks_say_so():
    if torch.cuda.is_available():
        pytest.skip("a machine with a card may have them")
    assert not any(available._installed(package) for package in available.PACKAGES.values())
    assert available.capability() is None and chosen(device="cpu")[0] == "torch"


def test_a_call_that_the_plans_kernel_does_not_take_goes_to_torch_and_then_to_the_formulas(monkeypatch):
    made = {"flash_attention_2": make_kernel("flash_attention_2", "2.5.0", (torch.float64,))}
    real = kernels.make
    monkeypatch.setattr(kernels, "make", lambda name: made.get(name) or real(name))
    q, _, v, _ = tensors()

    def name(q, v, score=Score(1.0)):
        return kernels.choose("flash_attention_2", q, v, score).name

    assert name(q, v) == "flash_attention_2"
    assert name(q.float(), v.float()) == "torch"
    assert name(q, v, Score(1.0, softcap=2.0)) == "reference"
