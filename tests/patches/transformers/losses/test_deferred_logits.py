"""Deferred logits: which operations are recorded, and which compute the logits."""

import pytest
import torch
import torch.nn.functional as F

from ds_cp.patches.transformers.losses.deferred_logits import DeferredLogits


class Head(torch.nn.Linear):
    """A projection that counts its calls."""

    asked = 0

    def forward(self, hidden, work):
        self.asked += 1
        return work(hidden, self.weight, self.bias)


NOTED = {
    "scaled": lambda x: x * 0.25,
    "divided": lambda x: x / 8.0,
    "softcapped": lambda x: torch.tanh(x / 2.0) * 2.0,
    "by a module": lambda x: torch.nn.Tanh()(x),
    "upcast": lambda x: x.float(),
    "moved where it is": lambda x: x.to("cpu").to(torch.float32),
    "cut to the true vocabulary": lambda x: x[..., :9],
    "cut, spelt otherwise": lambda x: x[:, :, :9],
    "in place on a name": lambda x: x.__truediv__(3),
    "negative": lambda x: -x,
    "times a tensor without dims": lambda x: 2 * (x * torch.tensor(0.5)),
}
COMPUTED = {
    "of some tokens": lambda x: x[:, :2],
    "of one token": lambda x: x[0, 1],
    "summed": lambda x: x.sum(-1),
    "softmax": lambda x: F.softmax(x, -1),
    "with a bias": lambda x: x + torch.arange(11.0),
    "from the left": lambda x: torch.arange(11.0) * x,
    "reciprocal": lambda x: 1 / x,
    "concatenated": lambda x: torch.cat([x, x], dim=1),
    "compared": lambda x: x > 0,
    "an attribute": lambda x: x.T,
}


def deferred(seed=0):
    torch.manual_seed(seed)
    head = Head(6, 11)
    hidden = torch.randn(2, 7, 6, requires_grad=True)
    return head, hidden, DeferredLogits.of(head, hidden)


@pytest.mark.parametrize("name", NOTED)
def test_pointwise_operations_compute_nothing(name):
    head, hidden, logits = deferred()
    found, want = NOTED[name](logits), NOTED[name](F.linear(hidden, head.weight, head.bias))
    assert isinstance(found, DeferredLogits) and head.asked == 0
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
    targets = torch.randint(0, 9, (2, 7))
    got = found.cross_entropy(targets, -100)
    assert head.asked == 1
    exact = F.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(got, exact)
    for mine, true in zip(
        torch.autograd.grad(got, [hidden, head.weight]), torch.autograd.grad(exact, [hidden, head.weight])
    ):
        torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("name", COMPUTED)
def test_any_other_use_computes_the_logits(name):
    head, hidden, logits = deferred()
    want = F.linear(hidden, head.weight, head.bias)
    torch.testing.assert_close(COMPUTED[name](logits / 2), COMPUTED[name](want / 2))
    assert head.asked == 1


def test_logits_computed_after_a_change_of_the_weights_raise():
    head = Head(6, 11)
    logits = DeferredLogits.of(head, torch.randn(1, 4, 6))
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight of Head was changed in place .* logits that are computed only now"):
        logits.exp()


def test_the_loss_uses_logits_that_were_changed_in_place():
    head, hidden, logits = deferred()
    targets = torch.randint(0, 9, (2, 7))
    logits[..., 9:] = torch.finfo(torch.float32).min  # chameleon masks its image tokens like this
    want = F.linear(hidden, head.weight, head.bias)[..., :9]
    torch.testing.assert_close(
        logits.cross_entropy(targets, -100), F.cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="sum")
    )
