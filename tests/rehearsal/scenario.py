"""One training run of the rehearsal: a rank of a pretended world, a model, an engine, batches, and the tape's report."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

import deepspeed
import torch
from rehearsal import card, flash, group, mistakes
from rehearsal.layers import layers_of, mark_layers
from rehearsal.places import short
from rehearsal.tape import Functions, Tape
from torch._subclasses.fake_tensor import FakeTensorMode

WORLD = 8
TOKENS = 8192
"""Per rank: enough that activations are offloaded, and that the loss has several chunks."""
MLP_CHUNK_BYTES = 4 << 20
"""As many as give MLPs of this shape two chunks on a card; by default they would have one."""
LAYERS = 3
BLOCK = 4096
"""Tokens of a chunk of a layer where K and V are offloaded."""
SHAPE = dict(
    hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    vocab_size=16384, num_hidden_layers=LAYERS, max_position_embeddings=WORLD * TOKENS, use_cache=False,
)  # fmt: skip
CAPABILITY = {"flash_attention_4": (10, 0), "flash_attention_3": (9, 0)}

METHODS = {
    "ring": {"size": WORLD, "method": "ring"},
    "ulysses": {"size": WORLD, "method": "ulysses"},
    "hybrid": {"size": WORLD, "method": "hybrid", "ulysses_size": 2},
    "allgather": {"size": WORLD, "method": "allgather"},
}
MEMORY = {
    "plain": {},
    "offload_kv": {"offload_kv": BLOCK},
    "offload_activations": {"offload_activations": True},
    "tiled_mlp": {"tiled_mlp": True},
}

library = torch.library.Library("rehearsal_merge", "DEF")
library.define("merge(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()")
library.impl("merge", lambda *tensors: None, "Meta")


@contextlib.contextmanager
def pretended_rank(rank: int, kernel: str = "torch") -> Iterator[Tape]:
    """This process is one rank of the world, and every tensor made inside is fake."""
    from ds_cp.patches.transformers.memory import chunked_mlp

    name, _, version = kernel.partition(" ")
    card.capability = CAPABILITY.get(name, (9, 0))
    tape = Tape(torch.device("cuda", rank))
    card.wait = tape.wait
    flash.report = lambda problem: tape.fault("arguments", problem)
    group.join(rank, WORLD)
    deepspeed.init_distributed(verbose=False)
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as folder:
        if version:
            flash.install(name, version, Path(folder))
        _one_launch_per_merge(tape)
        chunked_mlp.CHUNK_BYTES = MLP_CHUNK_BYTES
        with FakeTensorMode(allow_non_fake_inputs=True), tape, Functions(tape):
            yield tape


def _one_launch_per_merge(tape: Tape) -> None:
    """On a card the merge is one compiled kernel; what it is given is checked here."""
    from ds_cp.attention import attend

    def merge(out, lse, part, part_lse):
        if not (out.is_cuda and {x.device for x in (out, lse, part, part_lse)} == {out.device}):
            tape.fault("device", "merge of tensors on different devices")
        if {out.dtype, lse.dtype, part_lse.dtype} != {torch.float32} or part.dtype not in (
            torch.bfloat16,
            torch.float32,
        ):
            tape.fault("dtype", f"merge of {out.dtype}, {lse.dtype}, {part.dtype}, {part_lse.dtype}")
        if out.shape != part.shape or lse.shape != part_lse.shape or out.shape[:-1] != lse.shape:
            tape.fault("shape", f"merge of {[tuple(x.shape) for x in (out, lse, part, part_lse)]}")
        torch.ops.rehearsal_merge.merge(out, lse, part, part_lse)

    assert hasattr(attend, "merge_partial_attention"), "the merge has another name: its stand-in must take it"
    attend.merge_partial_attention = merge


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What happened in one case, as data for JSON. ``case["kind"]`` names a function of this module."""
    start, cpu = time.monotonic(), time.process_time()
    report: dict[str, Any] = {"case": case, "error": None}
    tapes: list[Tape] = []
    try:
        report |= globals()[case["kind"]](case, tapes) or {}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{name}:{frame.lineno}" for frame in frames if (name := short(frame.filename))]
        text = str(error).strip().splitlines() or [""]
        report["error"] = f"{type(error).__name__}: {text[0][:300]} at {' < '.join(where[-3:][::-1])}"
        report["traceback"] = "".join(traceback.format_exception(error))[-6000:]
    for tape in tapes:
        report |= _what_the_tape_says(tape)
    report["seconds"] = round(time.monotonic() - start, 2)
    report["cpu_seconds"] = round(time.process_time() - cpu, 2)
    return report


def _what_the_tape_says(tape: Tape) -> dict[str, Any]:
    per_layer: dict[str, dict[str, int]] = {}
    for (phase, layer, operation), number in tape.launches.items():
        if layer == LAYERS // 2:
            per_layer.setdefault(phase, {})[operation] = number
    return {
        "faults": [[kind, what, where, number] for (kind, what, where), number in tape.faults.items()],
        "waits": [[*key, number] for key, number in tape.waits.items()],
        "host_tensors": [[*key, number] for key, number in tape.host_tensors.items() if number],
        "launches": per_layer,
        "calls": dict(tape.calls),
        "messages": tape.messages,
        "chosen": card.chosen,
        "peak": dict(tape.peak),
        "peak_at": tape.peak_at,
        "backends": group.backends,
    }


# ---- a model in an engine -----------------------------------------------------------------------------------


def engine(case: dict[str, Any], tapes: list[Tape]) -> dict[str, Any]:
    """Steps of DeepSpeed's engine; the last one says what a step costs."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    rank = case["rank"]
    with pretended_rank(rank, case["kernel"]) as tape:
        tapes.append(tape)
        config = LlamaConfig(**SHAPE)
        with torch.device("cpu" if case.get("on_host") else f"cuda:{rank}"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
        if case["checkpointing"] != "off":
            reentrant = case["checkpointing"] == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        tape.phase = "initialize"
        mistakes.plant(case.get("plant"))
        made, *_ = deepspeed.initialize(model=model, config=json_config(case))
        mark_layers(tape, layers_of(model))
        weights = 0
        for step in range(case["steps"]):
            if step == case["steps"] - 1:
                _forget_first_step(tape)
                weights = tape.living()
                tape.peak = dict.fromkeys(tape.peak, weights)
            tape.phase = "batch"
            inputs = {name: x.to(made.device) for name, x in batch(case["batch"]).items()}
            tape.phase = "forward"
            loss = made(**inputs).loss
            if loss.dtype != torch.float32 or loss.device != tape.device:
                tape.fault("dtype", f"the loss is {loss.dtype} on {loss.device}")
            tape.phase = "backward"
            made.backward(loss)
            tape.layer, tape.phase = None, "step"
            made.step()
            del loss, inputs
        return {"weights": weights}


def _forget_first_step(tape: Tape) -> None:
    """Launches are counted in the last step only, and what the host waits for in earlier ones is kept apart."""
    tape.launches.clear()
    tape.waits, before = Counter(), tape.waits
    tape.waits.update({(f"first {phase}", *rest): number for (phase, *rest), number in before.items()})


def json_config(case: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed JSON of a case."""
    name, _, _ = case["kernel"].partition(" ")
    key = METHODS[case["method"]] | MEMORY[case["memory"]] | {"kernel": name, "unverified": "allow"}
    zero: dict[str, Any] = {"stage": case["stage"], "reduce_bucket_size": 20_000_000}
    if case["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20_000_000}
    return {
        "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "zero_optimization": zero,
        "steps_per_print": 10**9, "context_parallel": key,
    }  # fmt: skip


def batch(kind: str, tokens: int = WORLD * TOKENS, vocab: int = SHAPE["vocab_size"]) -> dict[str, torch.Tensor]:
    """One row of real integers, in host memory."""
    ids = torch.randint(0, vocab, (1, tokens))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        lengths, left = [], tokens
        for length in (2400, 1, 16000, 130, 7600, 1, 1, 4100, 512, 10400, 300, tokens):
            length = left if length == tokens else max(1, length * tokens // 65536)
            lengths.append(min(length, left))
            left -= lengths[-1]
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths if length])[None]
    elif kind == "padded":
        mask = torch.ones(1, tokens, dtype=torch.long)
        mask[:, 2 * tokens // 3 :] = 0
        inputs["attention_mask"] = mask
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    return inputs


# ---- a model type without an engine -------------------------------------------------------------------------


def model_type(case: dict[str, Any], tapes: list[Tape]) -> dict[str, Any]:
    """Forward and backward passes of a tiny model of a type, attached as in a loop without DeepSpeed's engine."""
    import ds_cp
    from ds_cp.cli.shrink import causal_lm, tiny_config
    from ds_cp.config import ConfigError
    from ds_cp.patches.transformers.attach import attachment

    with pretended_rank(case["rank"]) as tape:
        tapes.append(tape)
        config = tiny_config(case["type"])
        config.use_cache = False
        with torch.device("cuda", case["rank"]):
            model = causal_lm(config, attn_implementation="eager", dtype=torch.bfloat16).train()
        model.to(tape.device)  # some models make parameters in host memory whatever the default device is
        tape.phase = "initialize"
        try:
            ds_cp.context_parallel(model, {"size": WORLD, "method": case["method"], "unverified": "allow"})
        except ConfigError as error:
            return {"refused": str(error).splitlines()[0]}
        mark_layers(tape, layers_of(model))
        mistakes.plant(case.get("plant"))
        tape.phase = "batch"
        vocab = config.get_text_config(decoder=True).vocab_size
        inputs = {name: x.to(tape.device) for name, x in batch(case.get("batch", "dense"), 256, min(vocab, 64)).items()}
        tape.phase = "forward"
        loss = model(**inputs).loss
        tape.layer, tape.phase = None, "backward"
        loss.backward()
        without = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
        return {"without_gradient": without, "regions": attachment(model).forwards}


# ---- the first message of a group ---------------------------------------------------------------------------


def plain_loop(case: dict[str, Any], tapes: list[Tape]) -> None:
    """A loop without an engine, whose model lies in host memory when it is attached."""
    import ds_cp
    from ds_cp.cli.shrink import causal_lm, tiny_config

    with pretended_rank(case["rank"]) as tape:
        tapes.append(tape)
        with torch.device("cpu"):
            model = causal_lm(tiny_config("llama"), dtype=torch.bfloat16).train()
        tape.phase = "initialize"
        ds_cp.context_parallel(model, {"size": WORLD, "method": case["method"]})


def write(report: dict[str, Any], file: Path) -> None:
    """Atomically: whoever sees the file sees all of it."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(report, default=str))
    unfinished.replace(file)
