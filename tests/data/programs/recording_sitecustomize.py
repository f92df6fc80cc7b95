"""A `sitecustomize`, which Python imports at start: replaces `ds_cp.patches` by a module that records its calls."""

import os
import sys
import types


def on_import(name):
    module = sys.modules[name]
    ready = {
        "deepspeed.runtime.config": "DeepSpeedConfig",
        "accelerate.utils.deepspeed": "HfDeepSpeedConfig",
        "accelerate.commands.config.config_args": "ClusterConfig",
    }
    torch = sys.modules.get("torch")
    with open(os.environ["RECORD_TO"], "a") as out:
        print(name, hasattr(module, ready[name]), hasattr(torch, "compile"), file=out)
    if os.environ.get("RECORD_THEN") == "raise":
        raise ValueError("a fault in a patch")


stand_in = types.ModuleType("ds_cp.patches")
stand_in.on_import = on_import
sys.modules["ds_cp.patches"] = stand_in
