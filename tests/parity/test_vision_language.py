"""Vision-language models: image tokens cross the borders of shards, vision towers train, masks are created before the decoder."""

import functools

import pytest
import torch

from harness import heads, models, oracle, vision

RING = {"size": 2, "method": "ring"}
WAYS = {
    "ring": RING,
    "ulysses": RING | {"method": "ulysses"},
    "contiguous": RING | {"layout": "contiguous"},
    "hybrid": RING | {"size": 4, "method": "hybrid", "ulysses_size": 2},
}
CASES = [(name, "images", "ring") for name in vision.CONFIGS] + [
    ("llava", "padded", "contiguous"),
    ("gemma3", "padded", "contiguous"),
    ("gemma4", "padded", "contiguous"),
    ("paligemma", "padded", "contiguous"),
    ("qwen2_5_vl", "padded", "contiguous"),
    ("qwen3_vl", "padded", "contiguous"),
    ("llava", "text", "ring"),
    ("llava", "packed", "ulysses"),
    ("gemma3", "images", "hybrid"),
    ("gemma3", "text", "ulysses"),
    ("paligemma", "images", "ulysses"),
    ("qwen2_5_vl", "images", "hybrid"),
    ("qwen3_vl", "images", "hybrid"),
    ("qwen3_vl", "text", "ring"),
    ("mllama", "images", "hybrid"),
    ("mllama", "text", "ring"),
]


def check(workers, name, kind, way, checkpointing=None):
    inputs = vision.batch(name, kind)
    seen = inputs["attention_mask"].bool() if kind == "padded" else None
    if kind == "packed":
        inputs["use_cache"] = False  # with a cache, transformers ignores packing

    def make(dtype=torch.float64):
        return vision.build(name, dtype)

    if checkpointing:
        inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
    heads.check(workers, make, WAYS[way], inputs, checkpointing, seen=seen, tolerance=1e-7)


@pytest.mark.parametrize("name, kind, way", CASES)
def test_loss_outputs_and_gradients_equal_those_of_one_process(workers, name, kind, way):
    check(workers, name, kind, way)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_gradient_checkpointing_changes_nothing(workers, name):
    check(workers, name, "images", "ring", "non-reentrant")


CUT = 23  # the start of the second document of a packed row


def alone(name, packed):
    """The two documents of a packed row, each with its image, as two batches."""
    per_token = ("input_ids", "labels", "token_type_ids", "mm_token_type_ids")
    sizes = packed["image_grid_thw"].prod(-1).tolist() if name in vision.BY_GRID else [1, 1]
    images = packed["pixel_values"].split(sizes)
    for image, part in enumerate((slice(0, CUT), slice(CUT, None))):
        one = {key: packed[key][:, part] for key in per_token if key in packed} | {"pixel_values": images[image]}
        yield one | ({"image_grid_thw": packed["image_grid_thw"][image][None]} if name in vision.BY_GRID else {})


def in_four_rows(model, documents):
    """Qwen's positions of a packed row: token positions, which restart with each document, then time, height and width."""
    length = [each["input_ids"].size(1) for each in documents]
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    of_images = [model.model.get_rope_index(**{name: each[name] for name in names})[0] for each in documents]
    counts = torch.cat([torch.arange(n) for n in length]).expand(1, 1, -1)
    return torch.cat([counts, torch.cat(of_images, dim=-1)])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "qwen3_vl", "qwen4_exp"])
def test_packed_documents_with_images_equal_each_document_alone(workers, name):
    """The oracle runs each document alone: for a packed row, transformers 5.24 indexes the images of gemma3 by their position in
    the document."""
    packed = vision.batch(name, "packed") | {"use_cache": False}
    make = functools.partial(vision.build, name)
    model, documents = make(), list(alone(name, packed))
    if name in vision.BY_GRID:
        packed["position_ids"] = in_four_rows(model, documents)
    with models.TransformersInDouble():
        tokens = [int((each["labels"][:, 1:] != -100).sum()) for each in documents]
        loss = sum(model(**each).loss * count for each, count in zip(documents, tokens)) / sum(tokens)
        loss.backward()
    ranks = workers(2).run(heads.shared, make, RING, packed)
    for got, *_ in ranks:
        oracle.assert_close_loss(got, loss.item(), 1e-8)
    oracle.assert_close_gradients(oracle.mean_over_ranks([rank[2] for rank in ranks]), oracle.gradients_of(model), 1e-7)


def generated(name, config):
    """Greedy tokens and scores after a prompt with images, and the logits of a call with a cache. The prompt is sharded except
    for mllama."""
    model = vision.build(name, torch.float32).eval()
    if config:
        import ds_cp
        from ds_cp.patches.transformers import prefill

        prefill.MIN_PROMPT_TOKENS = 30
        ds_cp.context_parallel(model, config)
    given = {n: v.float() if v.is_floating_point() else v for n, v in vision.batch(name).items() if n != "labels"}
    settings = dict(
        max_new_tokens=5, min_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    with torch.no_grad():
        out = model.generate(**given, **settings)
        return out.sequences, torch.stack(out.logits), model(**given, use_cache=True).logits


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", "qwen3_vl", "mllama"])
def test_generation_gives_the_same_tokens(workers, name):
    want = workers(1).run(generated, name, None)[0]
    for got in workers(2).run(generated, name, RING):
        assert torch.equal(got[0], want[0])
        for mine, theirs in zip(got[1:], want[1:]):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def implementations(name):
    import ds_cp

    model = ds_cp.context_parallel(vision.build(name), RING)
    towers = [module.config for key, module in model.named_modules() if "vis" in key and hasattr(module, "config")]
    return {config._attn_implementation for config in towers}, {model.get_decoder().config._attn_implementation}


@pytest.mark.parametrize("name", ["llava", "gemma4", "qwen3_vl"])
def test_vision_towers_keep_their_attention(workers, name):
    assert workers(2).run(implementations, name) == [({"eager"}, {"ds_cp"})] * 2


def test_every_accepted_type_is_compared_here():
    from ds_cp.patches.transformers import verified

    assert verified.VISION_LANGUAGE <= {name for name, *_ in CASES} | set(vision.TEXT_TYPES.values())


@pytest.mark.parametrize("name, fact", [("llava", "input_ids"), ("gemma3", "token_type_ids")])
def test_ids_and_token_types_that_the_decoder_does_not_get_are_compared_across_ranks(workers, name, fact):
    """The decoder gets embeddings instead of ids, and masks that were computed from the token types."""

    def one_value_differs():
        import ds_cp

        model, inputs = vision.build(name, torch.float32), vision.batch(name)
        ds_cp.context_parallel(model, RING | {"timeout": 5})
        inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
        changed = inputs[fact].clone()
        changed[1, 1] += torch.distributed.get_rank()
        model(**inputs | {fact: changed})

    workers(2).run_expecting_error(one_value_differs, "got different batches in forward 0")
