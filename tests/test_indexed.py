"""DeepSeek's sparse attention: each query chooses its keys among those of the whole sequence, and of its document."""

import copy

import pytest
import torch

from ds_cp.cli import compare
from ds_cp.cli.shrink import VOCAB, tiny_config
from harness import families

CP2 = {"size": 2, "unverified": "allow"}


def chosen_differ(model, ids):
    """Whether choosing matters at all: the same model sees other logits when it may see every key."""
    everything = families.build("deepseek_v32", tiny_config("deepseek_v32", index_topk=64))
    everything.load_state_dict(model.state_dict())
    with torch.no_grad():
        return not torch.allclose(model(input_ids=ids).logits, everything(input_ids=ids).logits, atol=1e-2)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_rows_with_padding_are_exact(workers, method):
    def compared():
        import ds_cp

        model = families.build("deepseek_v32")
        ids = torch.randint(5, VOCAB, (2, 29), generator=torch.Generator().manual_seed(3))
        mask = torch.ones_like(ids)
        mask[0, :6] = 0  # left
        mask[1, 20:] = 0  # right
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 6] = -100
        alone = tuple(({"input_ids": x, "labels": x}, x.size(1) - 1) for x in (ids[:1, 6:], ids[1:, :20]))
        batch = compare.Batch("padded", {"input_ids": ids, "labels": labels, "attention_mask": mask}, alone)
        truth = compare.truth(model, batch, families.in_double)
        shared = copy.deepcopy(model)
        ds_cp.context_parallel(shared, CP2 | {"method": method})
        errors = compare.errors(*compare.shared(shared, batch), truth)
        return errors.worst, truth.tolerance, chosen_differ(model, ids)

    error, tolerance, matters = workers(2).run(compared)[0]
    assert error <= tolerance and matters


def test_a_call_that_is_not_shared_still_hides_what_was_not_chosen(workers):
    def with_cache():
        import ds_cp

        model = families.build("deepseek_v32").eval()
        ids = torch.randint(5, VOCAB, (1, 29), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            want = model(input_ids=ids).logits
            ds_cp.context_parallel(model, CP2 | {"method": "ring"})
            first = model(input_ids=ids[:, :28], use_cache=True)
            last = model(input_ids=ids[:, 28:], past_key_values=first.past_key_values, use_cache=True)
        return (torch.cat([first.logits, last.logits], dim=1) - want).abs().max().item()

    assert workers(2).run(with_cache)[0] < 1e-4


def test_a_mask_of_the_users_own_is_refused(workers):
    def own_mask():
        import ds_cp

        model = families.build("deepseek_v32")
        ds_cp.context_parallel(model, CP2 | {"method": "ring"})
        ids = torch.full((1, 8), 7)
        model(input_ids=ids, labels=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool).tril())

    workers(2).run_expecting_error(own_mask, "chooses among the keys that a mask of its own shows")
