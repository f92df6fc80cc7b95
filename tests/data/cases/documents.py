"""Batches as positions, masks and boundaries, and the documents that they consist of."""


def whole(*documents):
    return [(start, stop, start, stop) for start, stop in documents]


DOCUMENTS = [
    # (name, arguments of Documents.find, ranges of the row)
    ("one document", dict(seq_len=4), whole((0, 4))),
    ("restart", dict(seq_len=5, positions=[[0, 1, 0, 1, 2]]), whole((0, 2), (2, 5))),
    ("one-token documents", dict(seq_len=4, positions=[[0, 0, 0, 1]]), whole((0, 1), (1, 2), (2, 4))),
    ("restart at another number", dict(seq_len=4, positions=[[3, 4, 9, 10]]), whole((0, 2), (2, 4))),
    ("cu_seqlens", dict(seq_len=5, boundaries=[0, 2, 5]), whole((0, 2), (2, 5))),
    ("cu_seqlens with an empty document", dict(seq_len=5, boundaries=[0, 2, 2, 5]), whole((0, 2), (2, 5))),
    ("seq_idx", dict(seq_len=5, seq_idx=[[7, 7, 8, 8, 7]]), whole((0, 2), (2, 4), (4, 5))),
    ("all-ones mask", dict(seq_len=4, positions=[[0, 1, 0, 1]], unmasked=[[1, 1, 1, 1]]), whole((0, 2), (2, 4))),
    (
        "positions that skip ahead under a mask",
        dict(seq_len=4, positions=[[0, 1, 9, 10]], unmasked=[[1, 1, 1, 1]]),
        whole((0, 4)),
    ),
    (
        "positions that repeat under a mask, as tokens of an image do",
        dict(seq_len=8, positions=[[0, 1, 2, 2, 2, 2, 3, 4]], unmasked=[[1] * 8]),
        whole((0, 8)),
    ),
    (
        "one-token documents under a mask",
        dict(seq_len=6, positions=[[0, 0, 0, 1, 0, 0]], unmasked=[[1] * 6]),
        whole((0, 1), (1, 2), (2, 4), (4, 5), (5, 6)),
    ),
    (
        "one-token documents behind the rest of another, under a mask",
        dict(seq_len=5, positions=[[7, 8, 0, 0, 1]], unmasked=[[1] * 5]),
        whole((0, 2), (2, 3), (3, 5)),
    ),
    (
        "an image in a packed document",
        dict(seq_len=8, positions=[[0, 1, 1, 1, 0, 1, 1, 2]], unmasked=[[1] * 8]),
        whole((0, 4), (4, 8)),
    ),
    ("no positions to speak of, under a mask", dict(seq_len=4, positions=[[0, 0, 0, 0]], unmasked=[[1] * 4]), whole((0, 4))),
    ("the same with padding", dict(seq_len=4, positions=[[0, 0, 0, 1]], unmasked=[[1, 1, 1, 0]]), [(0, 4, 0, 3)]),
    ("right padding", dict(seq_len=5, unmasked=[[1, 1, 1, 0, 0]]), [(0, 5, 0, 3)]),
    ("left padding", dict(seq_len=5, unmasked=[[0, 0, 1, 1, 1]]), [(2, 5, 2, 5)]),
    ("left padding, positions from the mask",
     dict(seq_len=5, unmasked=[[0, 0, 1, 1, 1]], positions=[[1, 1, 0, 1, 2]]), [(2, 5, 2, 5)]),
    ("a hole, positions count it", dict(seq_len=5, unmasked=[[1, 1, 0, 1, 1]], positions=[[0, 1, 2, 3, 4]]),
     [(0, 5, 0, 2), (0, 5, 3, 5)]),
    ("a hole, positions skip it", dict(seq_len=5, unmasked=[[1, 1, 0, 1, 1]], positions=[[0, 1, 1, 2, 3]]),
     [(0, 5, 0, 2), (0, 5, 3, 5)]),
    ("nothing but padding", dict(seq_len=3, unmasked=[[0, 0, 0]]), []),
]  # fmt: skip
