"""The code that runs during ``import torch``: it installs one import hook and does nothing else.

torch calls every entry point of the group ``torch.backends`` near the end of its own import; ds_cp's is :func:`activate`.
It inserts a finder into ``sys.meta_path`` for two modules that read a DeepSpeed config first, and for the module in which
``accelerate launch`` reads its own config. Right after one of them has been executed, the hook calls
``ds_cp.patches.on_import(name)``.

All three modules import torch before anything else of interest, so :func:`activate` has run before any of them is
executed, whichever of torch, deepspeed, accelerate and transformers a script imports first.

Two rules hold in this file. It imports only the standard library, because every program on the machine that uses torch
executes it. And it never raises, because an exception in an entry point breaks ``import torch``.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

WATCHED = ("deepspeed.runtime.config", "accelerate.utils.deepspeed", "accelerate.commands.config.config_args")


class _NotifyingLoader:
    """Wraps the loader of a watched module and calls :func:`_notify` once the module has been executed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # The original loader is restored before the module runs, so that neither the module nor later introspection
        # (inspect, importlib.resources, importlib.reload) meets this wrapper.
        module.__loader__ = self._inner
        if getattr(module, "__spec__", None) is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _notify(module.__name__)


class _WatchingFinder:
    """Finder for the watched modules only: delegates to the other finders, then wraps the loader of the spec they return."""

    # activate() looks for this attribute rather than for the class, so that a second copy of this file detects the first.
    ds_cp_watcher = True

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders return for a watched module, with its loader wrapped."""
        if fullname not in WATCHED or getattr(self._busy, "name", None) == fullname:
            return None
        # Another delegating finder may call this one again; the thread-local mark ends the recursion.
        self._busy.name = fullname
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None else None
                if spec is None:
                    continue
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _NotifyingLoader(spec.loader)
                return spec
        finally:
            self._busy.name = None
        return None


def _warn(sentence: str) -> None:
    """Print one line to stderr. A closed or missing stderr is no reason to fail."""
    try:
        print(f"ds_cp: {sentence}", file=sys.stderr, flush=True)
    except Exception:
        pass


def _notify(name: str) -> None:
    """Call ``ds_cp.patches.on_import(name)``. An exception in it is printed and does not break the import."""
    try:
        from ds_cp.patches import on_import

        on_import(name)
    except Exception as err:
        _warn(
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
    """Install the import hook, once per process. Never raises, and may be called any number of times."""
    try:
        if any(getattr(finder, "ds_cp_watcher", False) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _WatchingFinder())
        for name in WATCHED:
            module = sys.modules.get(name)
            if module is None:
                continue
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                _warn(
                    f"activated while '{name}' was half imported, too late to see it finish: "
                    "context parallelism is NOT active. Import torch, or ds_cp, before it."
                )
            else:
                _notify(name)
    except Exception as err:
        _warn(f"activation failed ({type(err).__name__}: {err}); context parallelism is NOT active.")
