"""The exchange of tokens for heads or channels: the split of heads, sums of gradients, messages of mixed dtypes."""

import pytest
import torch
import torch.utils.checkpoint


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_head_is_on_one_rank_together_with_its_group(ranks):
    from ds_cp.recurrent.channels import ChannelSplit

    for heads, groups in [(64, 64), (100, 1), (8, 2), (24, 8), (80, 8), (48, 2), (1, 1), (2, 1), (7, 7), (6, 3)]:
        split = ChannelSplit.plan(heads, groups, ranks)
        assert [head for run in split.heads for head in range(*run)] == [*range(heads)]
        width = heads // groups
        repeated = [group for group in range(groups) for _ in range(split.repeat)]
        for mine, served in zip(split.heads, split.groups):
            count, given = mine[1] - mine[0], repeated[slice(*served)]
            assert count == 0 or count % len(given) == 0
            used = [given[i // (count // len(given))] for i in range(count)]
            assert used == [head // width for head in range(*mine)]


def test_shares_of_a_group_are_summed_in_fp32(workers):
    """In bf16, 1 + 2^-8 + 2^-8 would be rounded to 1."""

    def summed():
        from ds_cp.layout import Layout
        from ds_cp.mesh import build
        from ds_cp.recurrent.channels import HeadExchange

        mesh = build(ring=3, ulysses=1, timeout=30.0)
        trade = HeadExchange(Layout(6, 3, 1), mesh.cp_group, (((0, 1),) * 3,), (1,))
        share = torch.full((1, 6, 1, 1), [1.0, 2.0**-8, 2.0**-8][mesh.cp_group.rank], dtype=torch.bfloat16)
        return trade.to_tokens([share], "backward")[0]

    for total in workers(3).run(summed):
        assert torch.equal(total, torch.full((1, 2, 1, 1), 1 + 2.0**-7, dtype=torch.bfloat16))


def test_tensors_of_several_dtypes_are_read_from_unaligned_bytes():
    """A rank's part of a message starts behind another's. After an odd number of bf16 values, fp32 values are not aligned."""
    from ds_cp.recurrent.channels import _pack_bytes, _unpack_bytes

    given = [torch.full((1, 1, 1, 1), 3.0, dtype=torch.bfloat16), torch.full((1, 1, 1, 1), 5.0)]
    for parcel in torch.cat([_pack_bytes(given).flatten()] * 2).chunk(2):
        assert _unpack_bytes(parcel.view(1, 1, -1), given, [(0, 1), (0, 1)]) == given
