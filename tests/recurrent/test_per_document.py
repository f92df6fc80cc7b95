"""Functions without an argument for documents run on each document separately."""

import numpy as np
import pytest
import torch
import torch.utils.checkpoint


def test_any_documents_are_run_separately():
    from ds_cp.mask.documents import Documents
    from ds_cp.recurrent.per_document import PerDocument

    generator = np.random.default_rng(0)
    for _ in range(50):
        rows, length = int(generator.integers(1, 4)), int(generator.integers(1, 40))
        seq_idx = np.sort(generator.integers(0, 4, (rows, length)), axis=1)
        unmasked = generator.random((rows, length)) < 0.8
        documents = Documents.find(rows, length, seq_idx=seq_idx, unmasked=unmasked)
        x = torch.from_numpy(generator.random((rows, length, 2)))
        alone = PerDocument.of(documents, length, "cpu")
        (got,) = alone.run(lambda x: [x.cumsum(1)], x)
        for row, lines in enumerate(documents.ranges):
            for start in {*lines[:, 0].tolist()}:
                tokens = np.concatenate([np.arange(*line[2:]) for line in lines if line[0] == start])
                torch.testing.assert_close(got[row, tokens], x[row, tokens].cumsum(0))


def test_a_single_call_for_all_documents_is_refused_when_it_would_be_mostly_padding():
    """One long document among many short ones, padded to the longest, would be many times the batch."""
    from ds_cp.agreement import BatchError
    from ds_cp.mask.documents import Documents
    from ds_cp.recurrent.per_document import PerDocument

    positions = np.concatenate([np.arange(1000), np.zeros(40, dtype=int)])[None]
    documents = Documents.find(1, 1040, positions=positions)
    assert len(PerDocument.of(documents, 1040, "cpu").batches) == 2
    with pytest.raises(BatchError, match="all 41 documents at once, padded to the longest: 41000 tokens for the 1040"):
        PerDocument.of(documents, 1040, "cpu", single_call=True)
