"""Generation: a long prompt is sharded, decoding is not; tokens and scores equal those of one process."""

import pytest
import torch
from transformers import DynamicCache

from harness import batches, models, subject
from harness.batches import BatchSpec
from harness.models import ModelSpec

MODELS = {
    "llama": ModelSpec("llama"),
    "qwen2": ModelSpec("qwen2"),
    "gemma3_text": ModelSpec("gemma3_text"),
    "gpt_oss": ModelSpec("gpt_oss"),
    "deepseek_v3": ModelSpec("deepseek_v3"),
    "dory": ModelSpec("dory"),  # looped layers, so that the cache has more entries than layers
    "bloom": ModelSpec("bloom", kv_heads=8),
    "rwkv": ModelSpec("rwkv"),
}
RUN_WHOLE = {"bloom", "rwkv"}  # bloom has its own attention with a cache, rwkv a state
WAYS = {
    "ring": {"size": 2, "method": "ring"},
    "ulysses": {"size": 2, "method": "ulysses"},
    "hybrid": {"size": 4, "method": "hybrid", "ulysses_size": 2},
}


def generated(name, config, kind):
    """Tokens and scores of greedy generation, and the number of regions that it opened."""
    model = models.build(MODELS[name], torch.float64, attention=None if config else "eager").eval()
    if config:
        import ds_cp
        from ds_cp.patches.transformers import prefill

        prefill.MIN_PROMPT_TOKENS = 30
        ds_cp.context_parallel(model, config)
    inputs = subject.inputs_without_labels(batches.make(BatchSpec(kind, 2, 37)))
    settings = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    with models.TransformersInDouble():
        out = model.generate(**inputs, **settings, output_logits=True)
    if not config:
        return out.sequences, torch.stack(out.logits), None
    from ds_cp.patches.transformers.attach import attachment

    return out.sequences, torch.stack(out.logits), attachment(model).forwards


@pytest.mark.parametrize(
    "name, way, kind",
    [
        ("llama", "ring", "left_pad"),
        ("llama", "hybrid", "dense"),
        ("qwen2", "ulysses", "left_pad"),
        ("gemma3_text", "ring", "left_pad"),
        ("gemma3_text", "ulysses", "dense"),
        ("gpt_oss", "ring", "dense"),
        ("deepseek_v3", "ring", "left_pad"),
        ("dory", "ring", "left_pad"),
        ("bloom", "ring", "left_pad"),
        ("rwkv", "ulysses", "dense"),
    ],
)
def test_tokens_and_scores_equal_those_of_one_process(workers, name, way, kind):
    tokens, scores, _ = generated(name, None, kind)
    for got, got_scores, regions in workers(WAYS[way]["size"]).run(generated, name, WAYS[way], kind):
        assert regions == (name not in RUN_WHOLE), "the prompt was not shared, or something else was"
        assert torch.equal(got, tokens)
        assert (got_scores - scores).abs().max() < 1e-9 * scores.abs().max()


def test_one_rank_may_generate_alone_from_a_short_prompt(workers):
    """Training scripts often generate samples on rank 0 only."""

    def by_rank_0():
        model = subject.changed_model(MODELS["llama"], WAYS["ring"]).eval()
        if torch.distributed.get_rank() == 0:
            ids = batches.make(BatchSpec("dense", 1, 12)).inputs["input_ids"]
            return model.generate(input_ids=ids, max_new_tokens=3, pad_token_id=0).shape[1]
        return 15

    assert workers(2).run(by_rank_0) == [15, 15]


def test_a_cache_on_one_rank_only_raises_on_all_ranks_in_training(workers):
    def one_with_cache():
        model = subject.changed_model(MODELS["llama"], WAYS["ring"]).train()
        inputs = batches.make(BatchSpec("dense", 1, 37)).inputs
        model(**inputs, cache=DynamicCache(config=model.config) if torch.distributed.get_rank() else None)

    workers(2).run_expecting_error(
        one_with_cache, "rank 0: 1 x 37 tokens, hidden states kept local.* rank 1: .* a KV cache filled"
    )


def cache_of_a_bare_decoder(config):
    model = models.build(MODELS["llama"], torch.float64, attention=None if config else "eager").eval()
    if config:
        import ds_cp
        from ds_cp.patches.transformers import prefill

        prefill.MIN_PROMPT_TOKENS = 30
        ds_cp.context_parallel(model, config)
    with torch.no_grad(), models.TransformersInDouble():
        out = model.model(**subject.inputs_without_labels(batches.make(BatchSpec("dense", 2, 37))), use_cache=True)
    cache = next(out[name] for name in ("cache", "past_key_values") if name in out)
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_a_bare_decoder_without_a_given_cache_returns_a_whole_one(workers):
    whole = cache_of_a_bare_decoder(None)
    for got in workers(2).run(cache_of_a_bare_decoder, WAYS["ring"]):
        torch.testing.assert_close(got, whole, atol=1e-12, rtol=0)


def test_generation_runs_whole_on_every_rank(workers):
    def generate(shared):
        model = models.build(MODELS["llama"])
        if shared:
            import ds_cp

            ds_cp.context_parallel(model, WAYS["ring"])
        prompt = batches.make(BatchSpec("dense", 1, 37)).inputs["input_ids"]
        return model.eval().generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)

    want = workers(1).run(generate, False)[0]
    for tokens in workers(2).run(generate, True):
        assert torch.equal(tokens, want)
