"""Memory of a training step, counted in torch storages."""

from harness import batches, subject
from harness.batches import BatchSpec


def per_token(spec, config, checkpointing, lengths):
    """Bytes that one more token on this rank adds to the peak of a step."""
    from ds_cp.chunked import cross_entropy
    from ds_cp.cli.bench.probes import PeakStorages

    cross_entropy.CHUNK_BYTES = 1 << 12  # keep the loss small, to measure the layers
    model = subject.changed_model(spec, config).train()
    if checkpointing:
        subject.enable_checkpointing(model, checkpointing)
    peaks = []
    for length in lengths:
        inputs = batches.make(BatchSpec("dense", 1, length)).inputs
        model(**inputs).loss.backward()
        with PeakStorages() as storages:
            model(**inputs).loss.backward()
        peaks.append(storages.peak_bytes)
    few, many = (length // config["size"] for length in lengths)
    return (peaks[1] - peaks[0]) / (many - few)
