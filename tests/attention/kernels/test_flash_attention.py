"""The FlashAttention kernels over stand-ins that have the signatures of the real packages."""

import inspect
import json

import pytest
import torch

from ds_cp.attention.attend import attend
from ds_cp.attention.exchange import PeerExchange
from ds_cp.attention.kernels.binding import UnknownVersion, bind
from ds_cp.attention.kernels.flash_attention_2 import FlashAttention2
from ds_cp.attention.kernels.reference import ReferenceKernel
from ds_cp.attention.kernels.torch_flash import TorchCudaKernel
from ds_cp.attention.score import Score
from ds_cp.cli.bench import in_process
from ds_cp.layout import Layout
from ds_cp.mask.documents import Documents
from ds_cp.mask.rules import CAUSAL, OPEN, Band
from ds_cp.mask.schedule import schedule
from harness.attention import block_inputs, packed_steps
from harness.flash_stand_in import SIGNATURES, VERSIONS, make_kernel, stand_in
from tools import flash_signatures

CPU = torch.device("cpu")
NEWEST = [(kernel, version) for kernel, version in VERSIONS if version in ("2.8.3.post2", "hopper 01afd16", "4.0.0b36")]


def shared(kernel, documents, rule, layout, heads=(4, 2), dims=(16, 16), score=Score(0.3)):
    """Output and gradients of a ring of threads, concatenated over the ranks."""
    length = sum(documents)
    q, k, v, grad_out = block_inputs(heads, length, length, dims, batch=1)
    positions = torch.cat([torch.arange(n) for n in documents]).numpy()[None]
    segments = Documents.find(1, length, positions=positions).segments(rule)

    def rank(group):
        local = [layout.shard(x, 2, group.rank).requires_grad_() for x in (q, k, v)]
        steps = schedule(segments, layout, group.rank)
        assert kernel.takes(local[0], local[2], score)
        out = attend(*local, lambda phase: PeerExchange(group, steps, 1, phase), kernel, score)
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
def test_softcap_is_computed_by_the_kernel(kernel, version):
    arguments = [30, 10], CAUSAL, Layout(40, 2, 1, "zigzag")
    score = Score(0.3, softcap=2.0)
    got = shared(make_kernel(kernel, version), *arguments, score=score)
    for a, b in zip(got, shared(ReferenceKernel(), *arguments, score=score)):
        assert torch.allclose(a, b, atol=1e-10, rtol=1e-10)


def test_a_version_without_softcap_does_not_take_it():
    q, _, v, _ = block_inputs()
    old = make_kernel("flash_attention_2", "2.5.9.post1")
    assert old.takes(q, v, Score(1.0)) and not old.takes(q, v, Score(1.0, softcap=2.0))


def test_packed_documents_are_one_varlen_call_in_each_pass():
    module = stand_in("flash_attention_2", "2.8.3.post2")
    shared(make_kernel("flash_attention_2", "2.8.3.post2"), [17, 1, 1, 18], CAUSAL, Layout(37, 1, 1))
    assert module.calls == [("_flash_attn_varlen_forward", 4), ("_flash_attn_varlen_backward", 4)]
    module = stand_in("flash_attention_2", "2.5.0")
    shared(make_kernel("flash_attention_2", "2.5.0"), [17, 1, 1, 18], CAUSAL, Layout(37, 1, 1))
    assert [name for name, _ in module.calls] == ["_flash_attn_forward"] * 4 + ["_flash_attn_backward"] * 4


# --- bindings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, version", VERSIONS)
def test_the_bindings_accept_every_recorded_signature(kernel, version):
    make_kernel(kernel, version)  # raises if an argument is missing


def test_a_renamed_argument_is_named_in_the_error():
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
    """On meta tensors, torch's shape functions run the calls: dense and varlen, with v wider than q."""
    kernel = TorchCudaKernel()
    q, k, v, grad_out = (x.to("meta", torch.bfloat16) for x in block_inputs((4, 2), 24, 24, (20, 24), batch=1))
    (launch,) = kernel.launches(packed_steps(documents)[0].tiles, torch.device("meta"))
    out, lse = kernel.forward(q, k, v, launch, Score(0.3))
    assert (out.shape, lse.shape, lse.dtype) == ((1, 4, 24, 24), (1, 4, 24), torch.float32)
    grads = kernel.backward(grad_out, q, k, v, out, lse, launch, Score(0.3))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_head_dims_on_blackwell():
    kernel = make_kernel("flash_attention_4", "4.0.0b36")
    assert kernel.padded_head_dims(64, 64) == (64, 64)
    assert kernel.padded_head_dims(100, 36) == (104, 104)
    assert kernel.padded_head_dims(192, 128) == (192, 128)
    assert kernel.padded_head_dims(160, 160) == (256, 256)
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
