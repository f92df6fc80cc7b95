"""Every causal LM type is exact or refused. The table of verified types is checked against the models."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_cp.cli.shrink import causal_lm, tiny_config
from ds_cp.patches.transformers.models import recurrent_tables
from ds_cp.patches.transformers.models.registry import REPLACED
from harness import families
from tools import sweep_families as sweep

TABLE = sweep.read()
EXACT = sorted(name for name, (verdict, _) in TABLE.items() if verdict == "exact")


def test_the_table_names_every_type_of_the_installed_transformers():
    assert set(TABLE) == set(families.causal_lm_types())
    assert {verdict for verdict, _ in TABLE.values()} <= set(sweep.MEANING)


def test_support_and_the_page_agree_with_the_table():
    from ds_cp.patches.transformers import support, verified

    assert support.VERIFIED == verified.TYPES | set(EXACT)
    assert sweep.PAGE.read_text() == sweep.page(TABLE)


NEEDS = {"gemma3n": "timm"}  # for its image tower


def compared(model_type, **how):
    if model_type in NEEDS:
        pytest.importorskip(NEEDS[model_type])
    return sweep.compared(model_type, **how)


# one type for each way in which attention reaches ds_cp, and every twentieth of all types
KINDS = [
    "roberta",
    "bart",
    "mvp",
    "rembert",
    "gpt_neo",
    "openai-gpt",
    "doge",
    "modernbert-decoder",
    "hrm_text",
    "mllama",
    "gemma3n_text",
]


@pytest.mark.parametrize("model_type", sorted({*KINDS, *EXACT[::20]}))
def test_a_sample_of_the_exact_types_is_exact(model_type):
    found = compared(model_type)
    assert found.verdict == "exact", found


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma2", "xglm"])
def test_hybrid_over_four_ranks_is_exact_too(model_type):
    found = compared(model_type, ranks=4)
    assert found.verdict == "exact", found


OUTSIDE = "outside of transformers' attention interface in "
REFUSED = [
    ("big_bird", rf"{OUTSIDE}encoder\.layer\.0\.attention\.self \(BigBirdBlockSparseAttention\) and \d+ more"),
    ("musicgen", r"its ids come in 4 rows per sequence, one for each table of embed_tokens"),
    ("gemma4_assistant", r"its 4 layers attend to the keys of another model \(num_kv_shared_layers = 4\)"),
]


@pytest.mark.parametrize("model_type, sentence", REFUSED, ids=[name for name, _ in REFUSED])
def test_a_refusal_names_the_layers_of_the_real_model(model_type, sentence):
    assert re.search(sentence, families.refused_at_start(model_type).detail)
    assert TABLE[model_type][0] == "refused"


NO_LONGER_KNOWN = [
    (
        "xlstm",
        (recurrent_tables.SUBMODULES, "xLSTMLayer"),
        r"pass from token to token in blocks\.0 \(xLSTMBlock\) and \d+ more",
    ),
    (
        "inkling_text",
        (REPLACED, "InklingRelativeLogits"),
        r"key in layers\.0\.self_attn \(InklingAttention\) and \d+ more",
    ),
    (
        "qwen4_exp_text",
        (REPLACED, "Qwen4ExpTextQSAIndexer"),
        r"layers\.3 \(.*\) and \d+ more, of kind \"indexed_att",
    ),
]


@pytest.mark.parametrize("model_type, line, sentence", NO_LONGER_KNOWN, ids=[name for name, *_ in NO_LONGER_KNOWN])
def test_a_layer_that_mixes_tokens_in_an_unknown_way_is_named(monkeypatch, model_type, line, sentence):
    """Removing a line from a table of known layers simulates an unknown model."""
    monkeypatch.delitem(*line)
    assert re.search(sentence, families.refused_at_start(model_type).detail)


def test_a_tiny_model_has_every_kind_of_layer_that_the_type_has():
    missing = {}
    for model_type in ("flint", "mllama", "kimi_linear", "dory", "lfm2", "gemma2", "deepseek_v3"):
        with torch.device("meta"):
            tiny = AutoModelForCausalLM.from_config(tiny_config(model_type))
        missing[model_type] = families.missing_kinds(model_type, tiny)
    assert not any(missing.values()), missing


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TABLE))
def test_every_type_is_what_the_table_says(model_type):
    found = compared(model_type)
    assert found.verdict == TABLE[model_type][0], found


OWN_SOFTMAX = ["xglm", "mvp", "trocr", "rembert", "megatron-bert", "roformer", "gpt_neo", "gpt_neox_japanese", "doge"]


def test_a_call_with_a_cache_runs_the_models_own_attention(workers):
    """Attention outside of transformers' attention interface adds its mask to the scores, so it needs an additive mask outside of a region."""

    def differences():
        import ds_cp

        found = {}
        ids = torch.randint(5, 100, (2, 21), generator=torch.Generator().manual_seed(4))
        for model_type in OWN_SOFTMAX:
            model = families.build(model_type).eval()
            with torch.no_grad():
                want = model(input_ids=ids).logits
                ds_cp.context_parallel(model, {"size": 2, "method": "ring", "unverified": "allow"})
                got = model(input_ids=ids, use_cache=True).logits
            assert families.shared_forwards(model) == 0
            found[model_type] = (got - want).abs().max().item()
        return found

    assert max(workers(2).run(differences)[0].values()) < 1e-5


@pytest.mark.parametrize("model_type", ["emu3", "mllama", "gemma4"])  # their decoders have another type
def test_an_exact_type_is_accepted_by_the_type_of_its_decoder(model_type):
    from ds_cp.patches.transformers import support

    with torch.device("meta"):
        model = causal_lm(tiny_config(model_type))
    assert TABLE[model_type][0] == "exact"
    support.check_model(model, "refuse")
