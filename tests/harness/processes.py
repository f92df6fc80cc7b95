"""Programs in a new interpreter, for tests of activation, imports and commands."""

import os
import subprocess
import sys


def run_python(code, cwd, **env):
    """Run `code` in a new interpreter in which torch loads its entry points; the CompletedProcess."""
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env}
    full_env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=full_env, capture_output=True, text=True, timeout=100
    )


def run_command(*arguments):
    """Run the command `ds_cp`; its exit code and output."""
    command = [sys.executable, "-c", "from ds_cp.cli import main; main()", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "250"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    return done.returncode, done.stdout + done.stderr
