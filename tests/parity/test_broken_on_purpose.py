"""Faults that would train wrong without an error. The parity check must detect each of them."""

import pytest
import torch

from harness import oracle, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

LLAMA = ModelSpec("llama")
PACKED = BatchSpec("packed", 1, 53, labels="documents_predict_the_next_document")
RING = {"size": 2, "method": "ring"}
ULYSSES = {"size": 2, "method": "ulysses"}


def merge_without_the_new_maximum(patch):
    from ds_cp.attention import attend

    def merge(out, lse, part, part_lse):
        out += part
        lse.copy_(part_lse)

    patch(attend, "merge_partial_attention", merge)


def one_exchange_step_is_skipped(patch):
    from ds_cp.attention.exchange import PeerExchange

    received = PeerExchange.received

    def all_but_the_last(self, key, value):
        found = list(received(self, key, value))
        return iter(found[:-1] if self.phase == "forward" else found)

    patch(PeerExchange, "received", all_but_the_last)


def gradients_of_keys_do_not_come_home(patch):
    from ds_cp.attention.exchange import PeerExchange

    return_gradients = PeerExchange.return_gradients
    patch(PeerExchange, "return_gradients", lambda self, step, grad, home: return_gradients(self, step, grad * 0, home))


def labels_shift_after_sharding(patch):
    from ds_cp import loss
    from ds_cp.patches.transformers.losses import causal_lm as head_loss

    patch(head_loss, "shift_left", lambda labels, ignore_index: labels)
    whole = head_loss.causal_lm_loss

    def shifted_locally(logits, targets, region, num_items=None, ignore_index=-100):
        class Local:
            mesh = region.mesh

            @staticmethod
            def shard(tensor, dim, pad_value):
                return loss.shift_left(region.shard(tensor, dim, pad_value), ignore_index)

        num_items = (loss.shift_left(targets, ignore_index) != ignore_index).sum()
        return whole(logits, targets, Local, num_items, ignore_index)

    patch(head_loss, "causal_lm_loss", shifted_locally)


def the_loss_sum_has_no_adjoint(patch):
    from ds_cp.collectives import _AllReduce

    patch(_AllReduce, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def the_all_to_all_has_the_wrong_adjoint(patch):
    from ds_cp.attention.ulysses import Ulysses

    to_tokens = Ulysses.to_tokens

    def tokens_in_the_wrong_order(self, phase, queries, keys=()):
        turned = [x.roll(x.size(2) // self.group.size, 2) if phase == "backward" else x for x in (*queries, *keys)]
        return to_tokens(self, phase, turned[: len(queries)], turned[len(queries) :])

    patch(Ulysses, "to_tokens", tokens_in_the_wrong_order)


def a_document_boundary_inside_a_shard_is_missed(patch):
    from ds_cp.mask import documents

    ranges = documents._ranges

    def without_the_second_boundary(runs, breaks, seq_len):
        breaks[breaks.nonzero()[0][2]] = 0  # the start of a row, which is a boundary in any case
        return ranges(runs, breaks, seq_len)

    patch(documents, "_ranges", without_the_second_boundary)


def positions_are_local(patch):

    from ds_cp.patches.transformers import decoder_stacks

    arguments = decoder_stacks.shard_batch.local_arguments

    def counted_from_zero(region, given, shape):
        local = arguments(region, given, shape)
        local["position_ids"] = torch.arange(region.layout.local_len).unsqueeze(0)
        return local

    patch(decoder_stacks.shard_batch, "local_arguments", counted_from_zero)


FAULTS = [
    (merge_without_the_new_maximum, RING),
    (one_exchange_step_is_skipped, RING),
    (gradients_of_keys_do_not_come_home, RING),
    (labels_shift_after_sharding, RING),
    (the_loss_sum_has_no_adjoint, RING),
    (the_all_to_all_has_the_wrong_adjoint, ULYSSES),
    (a_document_boundary_inside_a_shard_is_missed, RING),
    (positions_are_local, RING),
]


def broken(fault, config):
    fault(setattr)
    return subject.loss_and_gradients(LLAMA, config, [PACKED])


@pytest.mark.parametrize("fault, config", FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_the_parity_check_detects_the_fault(workers, fault, config):
    results = workers(2).run(broken, fault, config)
    with pytest.raises(AssertionError):
        subject.check(results, oracle.truth(LLAMA, PACKED))


@pytest.mark.parametrize("config", [RING, ULYSSES], ids=["ring", "ulysses"])
def test_without_a_fault_the_same_check_passes(workers, config):
    subject.check(workers(2).run(broken, lambda patch: None, config), oracle.truth(LLAMA, PACKED))


def test_full_logits_have_the_adjoint_of_their_gather(workers):
    """The backward pass of a gather adds up the gradients of all ranks. A slice of one rank's gradient would be wrong."""

    def own_loss(break_it):
        from ds_cp.collectives import _GatherSequence

        if break_it:
            whole = _GatherSequence.backward

            def only_mine(ctx, grad):
                return whole(ctx, grad * (ctx.group.rank == 0))

            _GatherSequence.backward = staticmethod(only_mine)
        model = subject.changed_model(LLAMA, RING)
        inputs = subject.inputs_without_labels(__import__("harness.batches").batches.make(PACKED))
        logits = model(**inputs).logits
        loss = (logits.double().softmax(-1)[..., 3] * torch.arange(logits.shape[1])).sum()
        loss.backward()
        return loss.item(), oracle.gradients_of(model)

    sound, faulty = workers(2).run(own_loss, False), workers(2).run(own_loss, True)
    want = oracle.mean_over_ranks([gradients for _, gradients in sound])
    with pytest.raises(AssertionError):
        oracle.assert_close_gradients(oracle.mean_over_ranks([g for _, g in faulty]), want, 1e-5)
