"""Batches: the arguments of the model, and the documents that they consist of."""

from dataclasses import dataclass

import torch

from harness.models import VOCAB

IGNORE = -100
NUM_ITEMS = 19  # as with gradient accumulation: not the number of tokens in this batch


@dataclass(frozen=True)
class Document:
    """A document: tokens `start:stop` of one row. `position` is the position id of its first token."""

    row: int
    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class Batch:
    inputs: dict  # the arguments of the model's forward
    documents: list
    targets: torch.Tensor  # [row, t]: the token that the logits at t must predict, or IGNORE

    @property
    def valid_tokens(self):
        return int((self.targets != IGNORE).sum())


@dataclass(frozen=True)
class BatchSpec:
    """Hashable description of a batch; `make` is deterministic."""

    kind: str = "dense"
    rows: int = 1
    length: int = 37
    labels: str = "all"
    seed: int = 0
    turn: int = 0  # rotates the documents of packed rows: other packings of the same length
    documents: tuple = ()  # lengths of every packed row's documents, instead of DOCUMENT_LENGTHS
    extras: tuple = ()  # of "shift_labels", "num_items_in_batch", "num_items_in_batch as a tensor", "no items"


# ---- documents of a row: their lengths; the last document takes the rest ----------------------------------

# With 64 tokens the borders of 2 and 4 contiguous shards and of 4 zigzag chunks are multiples of 16: document
# boundaries lie on them (16, 32) and between them. One-token documents occur alone, in pairs, first and last.
# The long document of the last row spans three shards.
DOCUMENT_LENGTHS = [
    [1, 10, 5, 16, 1, 1, 7],
    [9, 1, 22, 3],
    [1, 1, 6, 1],
]


def _documents_of_packed_rows(rows, length, turn=0, documents=()):
    given, documents = list(documents), []
    for row in range(rows):
        start, lengths = 0, given or DOCUMENT_LENGTHS[row % len(DOCUMENT_LENGTHS)]
        for size in lengths[turn:] + lengths[:turn] + [length]:
            stop = min(start + size, length)
            if stop > start:
                documents.append(Document(row, start, stop, position=0))
            start = stop
    return documents


def _padding_of(row, length):
    """Padding: a third of the first row, none of the second, two thirds of the third."""
    return [length // 3, 0, 2 * length // 3][row % 3] if length >= 3 else 0


# ---- kinds of batches: functions that return the documents and the arguments that describe them ------------


def _dense(rows, length):
    return [Document(row, 0, length, 0) for row in range(rows)], {}


def _packed(rows, length, turn=0, documents=()):
    documents = _documents_of_packed_rows(rows, length, turn, documents)
    return documents, {"position_ids": _restarting_positions(documents, rows, length)}


def _packed_with_ones_mask(rows, length):
    documents, inputs = _packed(rows, length)
    return documents, inputs | {"attention_mask": torch.ones(rows, length, dtype=torch.long)}


def _packed_by_cu_seq_lens(rows, length):
    """Positions do not restart: only the cumulative lengths of the row mark the documents."""
    assert rows == 1, "cu_seq_lens describe one flattened row"
    documents = [Document(d.row, d.start, d.stop, position=d.start) for d in _documents_of_packed_rows(1, length)]
    bounds = torch.tensor([0] + [d.stop for d in documents], dtype=torch.int32)
    longest = max(d.stop - d.start for d in documents)
    flash = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)
    return documents, flash


def _packed_by_positions_and_cu_seq_lens(rows, length):
    documents, inputs = _packed(rows, length)
    return documents, inputs | _packed_by_cu_seq_lens(rows, length)[1]


def _packed_by_seq_idx(rows, length):
    documents = [Document(d.row, d.start, d.stop, position=d.start) for d in _documents_of_packed_rows(rows, length)]
    seq_idx = torch.zeros(rows, length, dtype=torch.int32)
    for index, document in enumerate(documents):
        seq_idx[document.row, document.start : document.stop] = index
    return documents, {"seq_idx": seq_idx}


def _right_pad(rows, length):
    documents = [Document(row, 0, length - _padding_of(row, length), 0) for row in range(rows)]
    return documents, {"attention_mask": _mask_of(documents, rows, length)}


def _left_pad(rows, length):
    """Without position_ids, transformers counts positions from the start of the row, including padding."""
    pads = [_padding_of(row, length) for row in range(rows)]
    documents = [Document(row, pad, length, position=pad) for row, pad in enumerate(pads)]
    return documents, {"attention_mask": _mask_of(documents, rows, length)}


KINDS = {
    "dense": _dense,
    "packed": _packed,
    "packed_with_ones_mask": _packed_with_ones_mask,
    "packed_by_cu_seq_lens": _packed_by_cu_seq_lens,
    "packed_by_positions_and_cu_seq_lens": _packed_by_positions_and_cu_seq_lens,
    "packed_by_seq_idx": _packed_by_seq_idx,
    "right_pad": _right_pad,
    "left_pad": _left_pad,
}

# ---- valid labels, as fractions of the row ----------------------------------------------------------------

LABELS = {
    "all": (0, 1),
    "first_eighth": (0, 1 / 8),  # with up to 4 ranks, only rank 0 has valid labels, in every layout
    "last_eighth": (7 / 8, 1),  # only the last contiguous shard, only rank 0 under zigzag
    "middle": (7 / 16, 9 / 16),  # only the last rank under zigzag; around a border of contiguous shards
    "none": (0, 0),
    "documents_predict_the_next_document": (0, 1),  # the first token of a document keeps its label
}


def make(spec):
    packing = {name: value for name in ("turn", "documents") if (value := getattr(spec, name))}
    documents, seen = KINDS[spec.kind](spec.rows, spec.length, **packing)
    generator = torch.Generator().manual_seed(1000 + spec.seed)
    ids = torch.randint(0, VOCAB, (spec.rows, spec.length), generator=generator)
    labels = torch.full_like(ids, IGNORE)
    for document in documents:
        # The first token of a document is not predicted, neither in a packed row nor after left padding.
        first = document.start + (spec.labels != "documents_predict_the_next_document")
        labels[document.row, first : document.stop] = ids[document.row, first : document.stop]
    start, stop = (round(fraction * spec.length) for fraction in LABELS[spec.labels])
    labels[:, :start] = IGNORE
    labels[:, stop:] = IGNORE
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    inputs = {"input_ids": ids, "labels": labels} | seen
    if "shift_labels" in spec.extras:
        targets[:, ::3] = IGNORE  # so that using `labels` instead gives another loss
        inputs["shift_labels"] = targets
    if "num_items_in_batch" in spec.extras:
        inputs["num_items_in_batch"] = NUM_ITEMS
    if "num_items_in_batch as a tensor" in spec.extras:
        inputs["num_items_in_batch"] = torch.tensor(NUM_ITEMS)
    if "no items" in spec.extras:
        inputs["num_items_in_batch"] = torch.tensor(0)
    return Batch(inputs, documents, targets)


def _restarting_positions(documents, rows, length):
    positions = torch.zeros(rows, length, dtype=torch.long)
    for document in documents:
        positions[document.row, document.start : document.stop] = torch.arange(document.stop - document.start)
    return positions


def _mask_of(documents, rows, length):
    mask = torch.zeros(rows, length, dtype=torch.long)
    for document in documents:
        mask[document.row, document.start : document.stop] = 1
    return mask
