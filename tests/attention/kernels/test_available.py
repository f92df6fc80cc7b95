"""Which kernel "auto" chooses on a machine, which one a call gets, and what is refused."""

import pytest
import torch

from ds_cp.attention import kernels
from ds_cp.attention.kernels import available
from ds_cp.attention.kernels.binding import UnknownVersion
from ds_cp.attention.kernels.torch_flash import TorchCudaKernel
from ds_cp.attention.score import Score
from ds_cp.config import ConfigError, read
from ds_cp.planner import ModelFacts, resolve
from harness.attention import block_inputs
from harness.flash_stand_in import make_kernel


@pytest.fixture
def machine(monkeypatch):
    """`machine((9, 0), "flash_attention_2", ...)` simulates a card and the installed packages."""

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
    (None, ALL_THREE, "cuda", "torch", "no NVIDIA GPU"),
    ((10, 0), ALL_THREE, "cuda", "flash_attention_4", "compute capability 10.0"),
    ((9, 0), ALL_THREE, "cuda", "flash_attention_3", "compute capability 9.0"),
    ((8, 0), ALL_THREE, "cuda", "flash_attention_2", "compute capability 8.0"),
    ((10, 0), ("flash_attention_2", "flash_attention_3"), "cuda", "flash_attention_2", "best installed"),
    ((9, 0), ("flash_attention_4",), "cuda", "torch", "no usable package"),
    ((9, 0), (), "cuda", "torch", "that torch ships"),
    ((7, 5), ALL_THREE, "cuda", "torch", "no FlashAttention runs on compute capability 7.5"),
]


@pytest.mark.parametrize("card, installed, device, kernel, why", CHOICES)
def test_auto_chooses_the_best_kernel_that_the_machine_can_run_with_a_reason(
    machine, card, installed, device, kernel, why
):
    machine(card, *installed)
    name, reason = chosen(device=device)
    assert name == kernel and why in reason


def test_auto_skips_a_package_of_an_unknown_version_and_names_layers_with_wide_heads(machine):
    machine((9, 0), *ALL_THREE, broken=("flash_attention_3",))
    assert chosen()[0] == "flash_attention_2"
    assert "layers of head dim 512" in chosen(head_dims=(256, 512))[1]


REFUSED = [
    (None, (), "cpu", "flash_attention_2", 'needs an NVIDIA GPU and this job runs on "cpu". Use "torch" or "auto"'),
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
        r"needs a Hopper GPU \(compute capability 9\) and this one has 8.0",
    ),
    ((8, 0), ALL_THREE, "cuda", "flash_attention_4", "needs a Blackwell or Hopper GPU"),
    (None, ALL_THREE, "cuda", "flash_attention_2", "no NVIDIA GPU is visible here"),
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
def test_the_torch_kernel_does_not_take_old_cards(machine, monkeypatch, card, takes):
    machine(card)
    monkeypatch.setattr(TorchCudaKernel, "device", "meta")
    q = torch.zeros(1, 1, 2, 64, dtype=torch.float16, device="meta")
    assert TorchCudaKernel().takes(q, q, Score(1.0)) is takes


def test_without_a_card_the_real_checks_find_no_package():
    if torch.cuda.is_available():
        pytest.skip("a machine with a card may have them")
    assert not any(available._installed(package) for package in available.PACKAGES.values())
    assert available.capability() is None and chosen(device="cpu")[0] == "torch"


def test_a_call_that_the_planned_kernel_does_not_take_falls_back_to_torch_then_to_reference(monkeypatch):
    made = {"flash_attention_2": make_kernel("flash_attention_2", "2.5.0", (torch.float64,))}
    real = kernels.make
    monkeypatch.setattr(kernels, "make", lambda name: made.get(name) or real(name))
    q, _, v, _ = block_inputs()

    def name(q, v, score=Score(1.0)):
        return kernels.choose("flash_attention_2", q, v, score).name

    assert name(q, v) == "flash_attention_2"
    assert name(q.float(), v.float()) == "torch"
    assert name(q, v, Score(1.0, softcap=2.0)) == "reference"
