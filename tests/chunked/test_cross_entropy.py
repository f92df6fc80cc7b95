"""Chunked cross entropy of a projection, compared with the cross entropy of whole logits."""

import pytest
import torch
import torch.nn.functional as F

from ds_cp.chunked import cross_entropy as chunked
from harness.tiles import small_tiles


def problem(dtype, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias_ = (torch.randn(*s, generator=generator, dtype=dtype) for s in ((23, 6), (11, 6), (11,)))
    targets = torch.randint(0, 11, (23,), generator=generator)
    targets[5:10] = -100  # a whole chunk
    targets[[0, 20, 22]] = -100
    return [x.requires_grad_() for x in (hidden, weight, *((bias_,) if bias else ()))], targets


def softcapped(logits):
    return 3 * torch.tanh(logits / 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("finish", [lambda x: x, softcapped, lambda x: x[..., :9] * 0.5], ids=["", "softcap", "cut"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sum_and_gradients_equal_those_of_whole_logits(bias, finish, smoothing):
    leaves, targets = problem(torch.float64, bias)
    targets = targets.clamp(max=8)
    with small_tiles(5, 11, 8):
        got = chunked.linear_cross_entropy(
            leaves[0], leaves[1], leaves[2] if bias else None, targets, finish, label_smoothing=smoothing
        )
    want = F.cross_entropy(finish(F.linear(*leaves)), targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    upstream = torch.tensor(0.37, dtype=torch.float64)
    for mine, true in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-14)


def test_ignored_targets_only_give_a_zero_loss_and_zero_gradients():
    leaves, targets = problem(torch.float32, True)
    total = chunked.linear_cross_entropy(*leaves, torch.full_like(targets, -100), lambda x: x)
    assert total.item() == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("frozen", [0, 1])
def test_with_one_frozen_input_the_other_has_the_same_gradient(frozen):
    leaves, targets = problem(torch.float64, False)
    leaves[frozen].requires_grad_(False)
    other = leaves[1 - frozen]
    with small_tiles(5, 11, 8):
        got = torch.autograd.grad(chunked.linear_cross_entropy(*leaves, None, targets, lambda x: x), other)[0]
    want = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets, reduction="sum"), other)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_with_whole_logits(dtype):
    """With chunks of one token, the gradients of the weights must be accumulated in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in ((512, 8), (50, 8)))
    targets = torch.randint(0, 50, (512,), generator=generator)
    precise = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = torch.autograd.grad(F.cross_entropy(F.linear(*precise), targets), precise)
    whole = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), targets), (hidden, weight))
    with small_tiles(1, 50, 4):
        total = chunked.linear_cross_entropy(hidden, weight, None, targets, lambda x: x)
    got = torch.autograd.grad(total / 512, (hidden, weight))
    for mine, its, true in zip(got, whole, want):
        assert (mine.double() - true).norm() <= 1.5 * (its.double() - true).norm()


def test_backward_may_run_twice():
    leaves, targets = problem(torch.float32, False)
    total = chunked.linear_cross_entropy(*leaves, None, targets, lambda x: x)
    first = torch.autograd.grad(2 * total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, 2 * b) for a, b in zip(first, second))


def test_weights_that_change_before_the_backward_pass_do_not_matter():
    """The gradients are computed in the forward pass."""
    leaves, targets = problem(torch.float64, True)
    want = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), targets, reduction="sum"), leaves)
    total = chunked.linear_cross_entropy(*leaves, targets, lambda x: x)
    with torch.no_grad():
        leaves[1].mul_(2)
    torch.testing.assert_close(torch.autograd.grad(total, leaves), want)


def test_under_autocast_it_is_as_exact_as_with_whole_logits():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, requires_grad=True) for shape in ((64, 16), (50, 16)))
    targets = torch.randint(0, 50, (64,))
    true = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16), small_tiles(7, 50):
        whole = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
        tiles = chunked.linear_cross_entropy(hidden, weight, None, targets, lambda x: x)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (true, whole, tiles)]
    for want, its, mine in zip(*gradients):
        assert 0 < (mine - want).norm() <= 1.2 * (its - want).norm()
