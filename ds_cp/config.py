"""The JSON key ``context_parallel``: its schema and its errors, nothing else.

The key lives inside the user's DeepSpeed config. :func:`read` checks it and :func:`normalise` writes the checked
form back, without any ``"auto"``: other readers of the same dict (accelerate) refuse autos that they cannot fill.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from typing import Any, Literal, Mapping

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

KEY = "context_parallel"

Auto = Literal["auto"]
Switch = Literal["auto", True, False]

WHOLE_NUMBERS: dict[str, tuple] = {"size": ("auto",), "ulysses_size": ("auto",), "offload_kv": ("auto", True, False)}
"""Keys that take a whole number, and what else they take."""


class ConfigError(ValueError):
    """A wrong ``context_parallel`` key; raised before ds_cp makes a group."""


class ContextParallelConfig(BaseModel):
    """The value of the JSON key. Every default is the first value of the README's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int | Auto = Field("auto", description="ranks that share one sequence")
    method: Literal["auto", "ulysses", "ring", "hybrid", "allgather"] = "auto"
    ulysses_size: int | Auto = Field("auto", description="hybrid: ulysses x ring = size")
    layout: Literal["auto", "zigzag", "contiguous", "balanced"] = "auto"
    kernel: Literal["auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "torch", "reference"] = (
        "auto"
    )
    checks: Literal["first_step", "every_step", "off"] = "first_step"
    timeout: float = Field(
        600.0, gt=0, strict=True, allow_inf_nan=False, description="seconds a rank waits for its group before it fails"
    )
    unverified: Literal["refuse", "allow"] = "refuse"
    tiled_loss: Switch = Field("auto", description="the loss in tiles of tokens, so that no rank holds [L, vocab]")
    tiled_mlp: Switch = Field("auto", description="MLPs in tiles of tokens, recomputed in the backward pass")
    offload_activations: Switch = Field("auto", description="what checkpointing keeps waits in host memory")
    offload_kv: StrictInt | Switch = Field(
        "auto", description="layers in tiles of tokens, K and V in host memory; the number is a tile's tokens"
    )
    recompute_attention: Literal[False, True] = Field(False, description="checkpointed layers compute attention twice")


def read(value: Any) -> ContextParallelConfig:
    """Check the value of the key.

    Args:
        value: what stands under ``"context_parallel"`` in the JSON.

    Raises:
        ConfigError: names the key, the value, what is allowed and the nearest spelling.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'"{KEY}" is {json.dumps(value, default=repr)}, but it must be an object such as {{"size": 8}}. '
            "Nothing was started."
        )
    if strange := [name for name in value if not isinstance(name, str)]:
        raise ConfigError(f'"{KEY}" has a key {strange[0]!r}, which is no name. Nothing was started.')
    wrong = [name for name, words in WHOLE_NUMBERS.items() if not _is_number_or(words, value.get(name, "auto"))]
    problems = [_bad_number(name, value[name]) for name in wrong]
    try:
        config = ContextParallelConfig(**{name: v for name, v in value.items() if name not in wrong})
    except ValidationError as error:
        problems += [_explain(detail) for detail in error.errors()]
    if problems:
        raise ConfigError("\n".join(problems) + "\nNothing was started.")
    return config


def load(ds_config: Any) -> Mapping[str, Any]:
    """A DeepSpeed config given as dict, path, JSON or base64 text; empty when it is none of these."""
    if isinstance(ds_config, Mapping):
        return ds_config
    if not isinstance(ds_config, (str, os.PathLike)):
        return {}
    text = os.fspath(ds_config)
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            parsed = _parse(file.read())
        return parsed if isinstance(parsed, Mapping) else {}
    for decode in (str, lambda t: base64.urlsafe_b64decode(t).decode("utf-8")):
        try:
            parsed = _parse(decode(text))
        except ValueError:
            continue
        if isinstance(parsed, Mapping):
            return parsed
    return {}


def unread_key(config: Mapping[str, Any], read_here: tuple[str, ...] = (KEY,)) -> str | None:
    """Where a config names the key so that nobody reads it: misspelt, or inside another object. Libraries pass over
    names that they do not know, so the run would share nothing and say nothing.

    Args:
        config: a whole DeepSpeed config, or the part of another library's config that is about DeepSpeed.
        read_here: the names at its top under which the key is read.

    Returns:
        The dotted name, ``"zero_optimization.context_parallel"`` say, or None.
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
    """Raise where a DeepSpeed config asks for sharing under a name or at a place that nobody reads.

    Raises:
        ConfigError: names what was found, and where the key belongs.
    """
    if found := unread_key(config):
        raise ConfigError(
            f'"{found}" in the DeepSpeed config is read by nobody, so no sequence would be shared, without a word. The key is '
            f'"{KEY}", at the top of the config, as in {{"{KEY}": {{"size": 8}}}}. Nothing was started.'
        )


def required_value(path: os.PathLike) -> Any:
    """The raw value of the key in a DeepSpeed JSON that must have it.

    Raises:
        ConfigError: it cannot be read; the key is missing, misspelt or in a wrong place.
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
    """The raw value of the key in a DeepSpeed config, in any of its forms; None when absent."""
    return load(ds_config).get(KEY)


def normalise(ds_config: dict[str, Any], world_size: int) -> ContextParallelConfig | None:
    """Check the key inside ``ds_config`` and replace it, in place, by its explicit form.

    Values that stay ``"auto"`` (they need the model) are left out: a missing value means auto here. A normalised
    dict may be normalised again with the same result, so every reader on the way may call this.

    Args:
        ds_config: a whole DeepSpeed config.
        world_size: ranks in the job; fills ``size: "auto"``.

    Returns:
        The checked config, or None when the key is absent.

    Raises:
        ConfigError: see :func:`read`, and when ``size`` does not divide the world.
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
    ds_config[KEY] = {name: v for name, v in config.model_dump().items() if v != "auto"}
    return config


def _resembles_the_key(name: str) -> bool:
    """Whether a name means the key: "contextParallel", "contex_parallel". Names that DeepSpeed has, such as
    "expert_parallel" (0.76), are further from it."""
    letters, meant = (re.sub("[^a-z]", "", word.lower()) for word in (name, KEY))
    return meant in letters or difflib.SequenceMatcher(None, letters, meant).ratio() > 0.83


def _parse(text: str) -> Any:
    """DeepSpeed reads its files with hjson (comments allowed); so do we, where it is installed."""
    try:
        import hjson
    except ImportError:
        return json.loads(text)
    return hjson.loads(text)


def _is_number_or(words: tuple, value: Any) -> bool:
    """Whether it is a whole number from 1 or one of the words; to Python True is 1."""
    if type(value) is int:
        return value >= 1
    return any(type(value) is type(word) and value == word for word in words)


def _bad_number(name: str, value: Any) -> str:
    words = ", ".join(map(json.dumps, WHOLE_NUMBERS[name]))
    return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}; allowed: {words} or a whole number from 1.'


def _explain(detail: Mapping[str, Any]) -> str:
    name = str(detail["loc"][0])
    fields = ContextParallelConfig.model_fields
    if detail["type"] == "extra_forbidden":
        hint = ' There is no switch: a "size" above 1 is on.' if name == "enabled" else _nearest(name, fields)
        return f'"{KEY}.{name}" is not a key of ds_cp.{hint} Known keys: {", ".join(fields)}.'
    value = detail["input"]
    if detail["type"] == "literal_error":
        allowed = fields[name].annotation.__args__
        listed = ", ".join(map(json.dumps, allowed))
        near = _nearest(str(value), [choice if isinstance(choice, str) else json.dumps(choice) for choice in allowed])
        return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}.{near} Allowed: {listed}.'
    return f'"{KEY}.{name}" is {json.dumps(value, default=repr)}: {detail["msg"].lower()}.'


def _nearest(word: str, choices: Any) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""
