"""What `import torch` loads: one post-import hook, and nothing else.

torch calls every entry point of the group `torch.backends` near the end of its own import. `activate` is
ours. It puts one finder on `sys.meta_path`, which waits for the two modules in which a DeepSpeed config is
first read, and for the one in which `accelerate launch` reads its own, and calls
`ds_cp.patches.on_import(name)` right after such a module has run.

Why these: all import torch before anything else that matters, so whichever of torch, deepspeed,
accelerate or transformers a script names first, this function has run before any of them is executed.

Two rules hold here. Only the standard library is imported, because every program on the machine that uses
torch pays for this file. And nothing raises, because an exception in an entry point breaks `import torch`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

WATCHED = ("deepspeed.runtime.config", "accelerate.utils.deepspeed", "accelerate.commands.config.config_args")


class _AfterExec:
    """A loader that runs another loader and then tells ds_cp that the module is ready."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # The module gets its own loader back before it runs, so that it, and whoever inspects it later
        # (inspect, importlib.resources, importlib.reload), never meets this wrapper.
        module.__loader__ = self._inner
        if getattr(module, "__spec__", None) is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _notify(module.__name__)


class _Watcher:
    """A finder for the watched names only: lets the other finders find, then wraps the loader they chose."""

    # Known by name and not by class, so that a second copy of this file sees the first one's hook.
    ds_cp_watcher = True

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders give for a watched module, with its loader wrapped."""
        if fullname not in WATCHED or getattr(self._busy, "name", None) == fullname:
            return None
        # Another hook of this kind may ask all finders again, this one included: the mark ends that circle.
        self._busy.name = fullname
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None else None
                if spec is None:
                    continue
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _AfterExec(spec.loader)
                return spec
        finally:
            self._busy.name = None
        return None


def _say(sentence: str) -> None:
    """Print one line to stderr; a closed or missing stderr is no reason to fail."""
    try:
        print(f"ds_cp: {sentence}", file=sys.stderr, flush=True)
    except Exception:
        pass


def _notify(name: str) -> None:
    """Call `ds_cp.patches.on_import(name)`; a fault in it is said aloud and does not break the import."""
    try:
        from ds_cp.patches import on_import

        on_import(name)
    except Exception as err:
        _say(
            f"context parallelism is NOT active: preparing '{name}' failed with {type(err).__name__}: {err}. "
            "A 'context_parallel' key in a DeepSpeed config would have no effect in this process. "
            "The traceback follows."
        )
        try:
            import traceback

            traceback.print_exc()
        except Exception:
            pass


def activate() -> None:
    """Install the hook, once per process. Never raises, and may be called any number of times."""
    try:
        if any(getattr(finder, "ds_cp_watcher", False) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Watcher())
        for name in WATCHED:
            module = sys.modules.get(name)
            if module is None:
                continue
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                _say(
                    f"activated while '{name}' was half imported, too late to see it finish: "
                    "context parallelism is NOT active. Import torch, or ds_cp, before it."
                )
            else:
                _notify(name)
    except Exception as err:
        _say(f"activation failed ({type(err).__name__}: {err}); context parallelism is NOT active.")
