"""The subject: an attached model on every rank of a process group."""

import contextlib

import torch
import torch.distributed

from harness import batches, models, oracle


def data_parallel_rank(size):
    """A context-parallel group consists of adjacent ranks, so its index is the data-parallel rank."""
    return torch.distributed.get_rank() // size


def changed_model(model_spec, config, dtype=torch.float32):
    import ds_cp

    model = models.build(model_spec, dtype)
    changed = ds_cp.context_parallel(model, config)
    assert changed is model
    return model


def in_full_precision(dtype):
    return models.TransformersInDouble() if dtype == torch.float64 else contextlib.nullcontext()


def loss_and_gradients(model_spec, config, batch_specs, dtype=torch.float32, checkpointing=None):
    """Forward and backward without an engine. Each group takes its own batch."""
    model = changed_model(model_spec, config, dtype).train()
    enable_checkpointing(model, checkpointing)
    batch = batches.make(batch_specs[data_parallel_rank(config["size"])])
    with in_full_precision(dtype):
        loss = model(**batch.inputs).loss
        loss.backward()
    return loss.item(), oracle.gradients_of(model)


def loss_and_gradients_of_two_forwards(model_spec, config, batch_specs, checkpointing=None):
    """Two forwards with different batches, then one backward pass of their mean."""
    model = changed_model(model_spec, config).train()
    enable_checkpointing(model, checkpointing)
    first, second = (model(**batches.make(spec).inputs).loss for spec in batch_specs)
    loss = (first + second) / 2
    loss.backward()
    return loss.item(), oracle.gradients_of(model)


def full_logits(model_spec, config, *batch_specs, dtype=torch.float32):
    """Evaluation without labels: every rank gets the logits of the whole batch."""
    model = changed_model(model_spec, config, dtype).eval()
    with torch.no_grad(), in_full_precision(dtype):
        return [model(**inputs_without_labels(batches.make(spec))).logits for spec in batch_specs]


def inputs_without_labels(batch):
    return {name: value for name, value in batch.inputs.items() if name not in ("labels", "shift_labels")}


def enable_checkpointing(model, mode):
    """`mode`: None, "reentrant" or "non-reentrant"."""
    if mode:
        use_reentrant = {"reentrant": True, "non-reentrant": False}[mode]
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})


def check(results, truth, dtype=torch.float32, losses=None):
    """Compare the loss of each rank, and the mean of the gradients over ranks, with the truth."""
    losses = losses or [truth.loss] * len(results)
    for (loss, _), want in zip(results, losses, strict=True):
        oracle.assert_close_loss(loss, want, oracle.LOSS_TOLERANCE[dtype])
    gradients = oracle.mean_over_ranks([gradients for _, gradients in results])
    oracle.assert_close_gradients(gradients, truth.gradients, oracle.TOLERANCE[dtype])


def gathered_bytes():
    """Bytes that this rank has sent in gathers of whole sequences, over all meshes."""
    from ds_cp import mesh

    return sum(each.cp_group.sent["gather"] for each in mesh.built_meshes())
