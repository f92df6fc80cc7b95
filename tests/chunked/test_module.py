"""Modules that run on chunks of tokens: gradients of their weights, and weights that change before the backward pass."""

import pytest
import torch

from ds_cp.chunked.module import run_in_chunks


def test_weights_of_many_tiles_are_summed_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(512, 8).bfloat16()
    layer = torch.nn.Linear(8, 5, bias=False)
    precise = torch.autograd.grad(layer.bfloat16().double()(x.double()).square().sum(), layer.weight)[0]
    layer = layer.bfloat16()
    whole = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    tiled = torch.autograd.grad(run_in_chunks(layer, layer.forward, x, 1).square().sum(), layer.weight)[0]
    assert (tiled.double() - precise).norm() <= 1.5 * (whole.double() - precise).norm()


class OneGradientForTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.more = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))

    def forward(self, x):
        return x @ (self.base + self.more)


def test_parameters_that_share_one_gradient_tensor_accumulate_separately():
    module, x = OneGradientForTwo(), torch.arange(12.0).view(4, 3)
    run_in_chunks(module, module.forward, x, 1).sum().backward()
    for parameter in module.parameters():
        assert torch.equal(parameter.grad, x.sum(0)[:, None].expand(3, 3))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 9), torch.nn.Linear(9, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def changed_in_place(module, weights, run):
    out = run()
    with torch.no_grad():
        module.up.bias.add_(1)  # autograd does not save a bias and would not raise
    return out


def frozen_and_changed_in_place(module, weights, run):
    module.down.requires_grad_(False)
    out = run()
    with torch.no_grad():
        module.down.weight.mul_(2)
    return out


def put_in_for_one_call(module, weights, run):
    out = torch.func.functional_call(Holder(module, run), {f"module.{n}": 2 * w.detach() for n, w in weights.items()})
    return out


def replaced(module, weights, run):
    out = run()
    module.up.weight = torch.nn.Parameter(module.up.weight.detach().clone())
    return out


class Holder(torch.nn.Module):
    def __init__(self, module, run):
        super().__init__()
        self.module, self.run = module, run

    def forward(self):
        return self.run()


CHANGES = [
    (
        changed_in_place,
        r"up\.bias of Mlp was changed in place since the forward pass, and its gradients would silently",
    ),
    (frozen_and_changed_in_place, r"down\.weight of Mlp was changed in place"),
    (put_in_for_one_call, r"up\.weight of Mlp is another tensor .* torch\.func\.functional_call"),
    (replaced, r"up\.weight of Mlp is another tensor since the forward pass"),
]


@pytest.mark.parametrize("change, message", CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_weights_that_change_before_the_backward_pass_raise(change, message):
    module, x = Mlp(), torch.randn(10, 6, requires_grad=True)
    out = change(module, dict(module.named_parameters()), lambda: run_in_chunks(module, module.forward, x, 3))
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()
