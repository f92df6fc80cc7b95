"""Whether a model's name on the command line leads somewhere."""

from __future__ import annotations

import difflib
from typing import Any


def config_of(model: str, types: bool = False) -> Any:
    """The config of a checkpoint folder, a ``config.json`` or a model in the local cache.

    Args:
        model: as it was typed.
        types: the command takes model types too, so the nearest one is named.

    Raises:
        ValueError: says what was looked for.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:  # nothing there, or something that is no model
        near, also = "", ""
        if types:
            close = difflib.get_close_matches(model, list(transformers.CONFIG_MAPPING), n=1)
            near = f' Did you mean the type "{close[0]}"?' if close else ""
            also = f", and no model type of transformers {transformers.__version__}"
        raise ValueError(
            f'"{model}" is no checkpoint folder and no config.json that names a model type, and no model in the local cache'
            f"{also}.{near}"
        ) from error
