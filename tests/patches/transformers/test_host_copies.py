"""One read of the device for all tensors of a batch, and none for tensors that the host still has."""

import gc

import pytest
import torch

from ds_cp.patches.transformers import bounds, host_copies
from ds_cp.patches.transformers.host_copies import HostCopies


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU and counts its reads."""

    device = torch.device("cuda", 0)
    reads = 0

    def cpu(self):
        OnDevice.reads += 1
        return self.as_subclass(torch.Tensor)


@pytest.fixture(autouse=True)
def no_reads():
    OnDevice.reads = 0


def on_device(tensor):
    return tensor.clone().as_subclass(OnDevice)


TENSORS = [
    torch.arange(12).view(3, 4),
    torch.tensor([[True, False, True]]),
    torch.arange(5, dtype=torch.int32).flip(0),
    torch.tensor(7),
    torch.empty(0, dtype=torch.int64),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([0.5, 1.0]),
]


def test_all_tensors_are_read_at_once():
    tensors = [on_device(tensor) for tensor in TENSORS]
    copies = HostCopies([*tensors, tensors[0]])
    assert OnDevice.reads == 1
    for tensor, want in zip(tensors, TENSORS, strict=True):
        array = copies.array(tensor)
        assert array.dtype == want.numpy().dtype
        assert (array == want.numpy()).all() and array.shape == want.shape
    assert copies.array(None) is None


def test_tensors_on_the_host_are_not_read():
    copies = HostCopies(TENSORS)
    assert all((copies.array(tensor) == tensor.numpy()).all() for tensor in TENSORS)
    assert OnDevice.reads == 0


def test_a_batch_that_a_loader_moved_needs_no_read():
    host = {"input_ids": torch.arange(6).view(2, 3), "nested": [torch.ones(2, dtype=torch.int64)]}
    device = {"input_ids": on_device(host["input_ids"]), "nested": [on_device(host["nested"][0])]}
    host_copies.remember(host, device)
    copies = HostCopies([device["input_ids"], device["nested"][0]])
    assert (copies.array(device["input_ids"]) == host["input_ids"].numpy()).all()
    lookup = bounds.Lookup("input_ids", device["input_ids"], 0, 5, "the vocabulary")
    bounds.refuse_out_of_range([lookup])
    assert OnDevice.reads == 0


def test_a_tensor_that_changed_is_read():
    host = torch.arange(6)
    device = on_device(host)
    host_copies.remember(host, device)
    device.add_(1)
    assert HostCopies([device]).array(device).tolist() == [1, 2, 3, 4, 5, 6]
    assert OnDevice.reads == 1


def test_nothing_is_kept_when_a_batch_is_gone():
    host = torch.arange(6)
    device = on_device(host)
    host_copies.remember(host, device)
    gc.collect()
    before = len(host_copies._originals)
    del device
    gc.collect()
    assert len(host_copies._originals) == before - 1
