"""The config entry ``context_parallel``: its schema and its error messages.

The entry is part of the user's DeepSpeed config. :func:`read` checks it, and :func:`normalise` writes the checked form back
without any ``"auto"``, because other readers of the same dict (accelerate) refuse an ``"auto"`` that they cannot fill in.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from typing import Any, Iterable, Literal, Mapping, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

KEY = "context_parallel"

Auto = Literal["auto"]
Switch = Literal["auto", True, False]

WHOLE_NUMBERS: dict[str, tuple[str | bool, ...]] = {
    "size": ("auto",),
    "ulysses_size": ("auto",),
    "offload_kv": ("auto", True, False),
}
"""Fields that take a whole number, and the other values that each of them takes."""


class ConfigError(ValueError):
    """An invalid config entry ``context_parallel``. Raised before ds_cp creates a process group."""


class ContextParallelConfig(BaseModel):
    """The value of the config entry. Each default is the first value of the README's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int | Auto = Field(
        "auto",
        description="Number of ranks that share one sequence. It must divide the number of ranks in the job. "
        '"auto" uses all ranks.',
    )
    method: Literal["auto", "ulysses", "ring", "hybrid", "allgather"] = Field(
        "auto",
        description="How queries meet the keys and values of other ranks. "
        '"ulysses" exchanges tokens for heads with an all-to-all before and after attention. '
        '"ring" sends keys and values between ranks, step by step, while attention is computed; a rank gets only the rows '
        "that it needs. "
        '"hybrid" runs ulysses over neighbouring ranks and a ring over the rest. '
        '"allgather" sends the same rows as "ring", all of them at once. '
        '"auto" chooses "ulysses" where the heads divide evenly by size and the ranks lie inside one node, otherwise '
        '"hybrid" with the largest ulysses_size that fits heads and node, otherwise "ring". A batch with packed documents may '
        "use another of these methods on the same ranks, if its predicted time is lower.",
    )
    ulysses_size: int | Auto = Field(
        "auto",
        description='Number of neighbouring ranks that split the heads, for the method "hybrid"; size must be a multiple '
        'of it, and the ring has size / ulysses_size ranks. "auto" chooses the largest number that fits heads and node.',
    )
    layout: Literal["auto", "zigzag", "contiguous", "balanced"] = Field(
        "auto",
        description="Which tokens each rank of the ring holds. "
        '"zigzag" gives rank r the chunks r and 2R-1-r of 2R equal chunks, which balances causal attention. '
        '"contiguous" gives each rank one range of tokens. '
        '"balanced" is computed for each batch from its documents: each rank holds equally many tokens and computes nearly '
        "equally many query-key pairs. "
        '"auto" uses "zigzag" on a ring, and "balanced" for batches with packed documents where that saves attention work or '
        'communication; without a ring it is "contiguous".',
    )
    kernel: Literal["auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "torch", "reference"] = (
        Field(
            "auto",
            description="Kernel that computes one tile of attention. "
            '"flash_attention_2", "flash_attention_3" and "flash_attention_4" are the FlashAttention packages of these versions. '
            '"torch" is the FlashAttention inside torch. '
            '"reference" is written in plain torch operations; it is slow and meant for comparisons. '
            '"auto" chooses the best installed FlashAttention package that runs on the device, and "torch" where there is none.',
        )
    )
    checks: Literal["first_step", "every_step", "off"] = Field(
        "first_step",
        description="When the contents of the batch (ids, positions, masks, labels) are compared between the ranks of a "
        "context-parallel group: on the first forward pass of training and of evaluation, on every forward pass, or never. "
        "Shapes are compared on every forward pass in any case.",
    )
    timeout: float = Field(
        600.0,
        gt=0,
        strict=True,
        allow_inf_nan=False,
        description="Seconds that a rank waits for the other ranks of its group before it raises an error.",
    )
    unverified: Literal["refuse", "allow"] = Field(
        "refuse",
        description="What to do with a model type whose loss and gradients are not known to equal those of a single process. "
        '"refuse" raises an error at start-up, "allow" trains it.',
    )
    tiled_loss: Switch = Field(
        "auto",
        description="Whether to compute the loss in chunks of tokens, so that no rank holds the logits of all its tokens. "
        'Applies to losses that ds_cp knows. "auto" means true.',
    )
    tiled_mlp: Switch = Field(
        "auto",
        description="Whether to run the MLPs of decoder layers in chunks of tokens and to recompute them in the backward "
        "pass, so that the activations of one chunk exist at a time. "
        '"auto" does so for an MLP if one of its activations is larger than 256 MiB.',
    )
    offload_activations: Switch = Field(
        "auto",
        description="Whether to offload each checkpointed layer's input to pinned host memory until the backward pass. "
        '"auto" means false.',
    )
    offload_kv: StrictInt | Switch = Field(
        "auto",
        description="Whether to run each decoder layer in chunks of tokens, with the keys and values of all tokens, and "
        "their gradients, in pinned host memory. A whole number is the number of tokens per chunk, and of keys and values "
        "that the device holds at a time; true means 8192. For the backward pass a layer saves its input and, unless "
        "recompute_attention is true, its attention output, with or without gradient checkpointing. Recurrent layers run "
        'as usual. "auto" means false.',
    )
    recompute_attention: Literal[False, True] = Field(
        False,
        description="Whether checkpointed layers compute and communicate attention a second time in the backward pass. "
        "False saves the attention output instead, one tensor of the size of the queries per layer.",
    )


def read(value: Any) -> ContextParallelConfig:
    """Check the value of the config entry.

    Args:
        value: Value of ``"context_parallel"`` in the JSON.

    Raises:
        ConfigError: A field or its value is invalid. The message names the allowed values and the nearest spelling.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{KEY}" is {json.dumps(value, default=repr)}, but it must be an object such as {{"size": 8}}. '
            "Nothing was started."
        )
    if not_text := [name for name in value if not isinstance(name, str)]:
        raise ConfigError(f'"{KEY}" has a key {not_text[0]!r}, which is no name. Nothing was started.')
    invalid = [name for name, others in WHOLE_NUMBERS.items() if not _is_number_or(others, value.get(name, "auto"))]
    problems = [_bad_number(name, value[name]) for name in invalid]
    try:
        config = ContextParallelConfig(**{name: v for name, v in value.items() if name not in invalid})
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors()]
    if problems:
        raise ConfigError("\n".join(problems) + "\nNothing was started.")
    return config


def load(ds_config: Any) -> Mapping[str, Any]:
    """Read a DeepSpeed config from a dict, a path, JSON text or base64 text. Anything else gives an empty mapping."""
    if isinstance(ds_config, Mapping):
        return ds_config
    if not isinstance(ds_config, (str, os.PathLike)):
        return {}
    text = os.fspath(ds_config)
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            parsed = _parse(file.read())
        return parsed if isinstance(parsed, Mapping) else {}
    for decode in (str, _decode_base64):
        try:
            parsed = _parse(decode(text))
        except ValueError:
            continue
        if isinstance(parsed, Mapping):
            return parsed
    return {}


def unread_key(config: Mapping[str, Any], read_here: tuple[str, ...] = (KEY,)) -> str | None:
    """Find ``context_parallel`` where no code reads it: misspelt, or inside another object of the config.

    Libraries ignore names that they do not know, so such a run would train without context parallelism and without a message.

    Args:
        config: A DeepSpeed config, or the part of another library's config that is about DeepSpeed.
        read_here: Names at the top level of ``config`` that are read.

    Returns:
        Dotted name of the entry, e.g. ``"zero_optimization.context_parallel"``, or None.
    """
    for name, value in config.items():
        if name in read_here:
            continue
        if _resembles_the_key(str(name)):
            return str(name)
        if isinstance(value, Mapping) and (inner := unread_key(value, read_here=())):
            return f"{name}.{inner}"
    return None


def refuse_unread_key(config: Mapping[str, Any]) -> None:
    """Raise an error if a DeepSpeed config contains an entry that :func:`unread_key` finds.

    Raises:
        ConfigError: The entry is misspelt or misplaced. The message says where it belongs.
    """
    if found := unread_key(config):
        raise ConfigError(
            f'"{found}" in the DeepSpeed config is read by nobody, so no sequence would be shared, without a message. The key is '
            f'"{KEY}", at the top of the config, as in {{"{KEY}": {{"size": 8}}}}. Nothing was started.'
        )


def required_value(path: os.PathLike[str]) -> Any:
    """Unchecked value of ``context_parallel`` in a DeepSpeed JSON file that must contain it.

    Raises:
        ConfigError: The file cannot be parsed, or the entry is missing, misspelt or misplaced.
    """
    try:
        ds_config = load(path)
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    refuse_unread_key(ds_config)
    if KEY not in ds_config:
        raise ConfigError(f'{path} has no "{KEY}": a run with it shares no sequence.')
    return ds_config[KEY]


def raw_value(ds_config: Any) -> Any | None:
    """Unchecked value of ``context_parallel`` in a DeepSpeed config in any form that :func:`load` reads, or None."""
    return load(ds_config).get(KEY)


def normalise(ds_config: dict[str, Any], world_size: int) -> ContextParallelConfig | None:
    """Check ``ds_config["context_parallel"]`` and replace it, in place, by a form without ``"auto"``.

    ``size: "auto"`` becomes a number. Other fields whose value is ``"auto"`` need the model and are left out, which means
    the same. The function is idempotent, so each reader of the dict may call it.

    Args:
        ds_config: DeepSpeed config.
        world_size: Number of ranks in the job.

    Returns:
        The checked config, or None if ``ds_config`` has no such entry.

    Raises:
        ConfigError: The entry is invalid (:func:`read`), ``size`` does not divide ``world_size``, or ``ulysses_size``
            does not divide ``size``.
    """
    if KEY not in ds_config:
        return None
    config = read(ds_config[KEY])
    size = world_size if config.size == "auto" else config.size
    if world_size % size:
        legal = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f'"{KEY}.size" is {size}, but the job has {world_size} ranks and {size} does not divide {world_size}: some '
            f"ranks would train without a group. Legal sizes here: {legal}."
            + (' Start more ranks: "deepspeed --num_gpus N" (CPU: --num_accelerators N).' if world_size == 1 else "")
            + " Nothing was started."
        )
    if isinstance(config.ulysses_size, int) and size % config.ulysses_size:
        legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ConfigError(
            f'"{KEY}.ulysses_size" is {config.ulysses_size}, but it must divide "{KEY}.size" ({size}), because '
            f"ulysses x ring = size. Legal values here: {legal}. Nothing was started."
        )
    config = config.model_copy(update={"size": size})
    ds_config[KEY] = {name: value for name, value in config.model_dump().items() if value != "auto"}
    return config


def _resembles_the_key(name: str) -> bool:
    """Whether a name is a spelling of ``context_parallel``, such as "contextParallel" or "contex_parallel".

    The threshold separates typos from DeepSpeed's own names: "expert_parallel" has a ratio of 0.76.
    """
    letters, key_letters = (re.sub("[^a-z]", "", text.lower()) for text in (name, KEY))
    return key_letters in letters or difflib.SequenceMatcher(None, letters, key_letters).ratio() > 0.83


def _decode_base64(text: str) -> str:
    return base64.urlsafe_b64decode(text).decode("utf-8")


def _parse(text: str) -> Any:
    """Parse JSON with hjson if it is installed, as DeepSpeed does: it allows comments."""
    try:
        import hjson
    except ImportError:
        return json.loads(text)
    return hjson.loads(text)


def _is_number_or(others: tuple[str | bool, ...], value: Any) -> bool:
    """Whether a value is a positive int or one of ``others``. Types are compared too, because ``True == 1`` in Python."""
    if type(value) is int:
        return value >= 1
    return any(type(value) is type(other) and value == other for other in others)


def _bad_number(name: str, value: Any) -> str:
    others = ", ".join(map(json.dumps, WHOLE_NUMBERS[name]))
    return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}; allowed: {others} or a whole number from 1.'


def _explain(detail: Mapping[str, Any]) -> str:
    """Message for one of pydantic's errors."""
    name = str(detail["loc"][0])
    fields = ContextParallelConfig.model_fields
    if detail["type"] == "extra_forbidden":
        hint = ' There is no switch: a "size" above 1 is on.' if name == "enabled" else _nearest(name, fields)
        return f'"{KEY}.{name}" is not a key of ds_cp.{hint} Known keys: {", ".join(fields)}.'
    value = detail["input"]
    if detail["type"] == "literal_error":
        allowed = get_args(fields[name].annotation)
        listed = ", ".join(map(json.dumps, allowed))
        near = _nearest(str(value), [choice if isinstance(choice, str) else json.dumps(choice) for choice in allowed])
        return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}.{near} Allowed: {listed}.'
    return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}: {detail["msg"].lower()}.'


def _nearest(text: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(choices), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""
