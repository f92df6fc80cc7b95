"""Gloo ranks for tests: fork, run a function on every rank, collect the results, and never hang.

Each call forks new ranks from the pytest process, which has imported everything. This costs 0.1 s more than ranks that
live as long as the session, and has three advantages: a crash, a hang or a broken process group ends with its test; no
state (patches, groups, caches, seeds) leaks into another test; functions and arguments may be closures. Only results
are pickled.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path

WATCHDOG_SECONDS = 60  # wall time of a call, after which it is a hang
GRACE_SECONDS = 3  # time for the other ranks after the first failure


@dataclass
class Report:
    """The result of one rank, or how it ended."""

    rank: int
    outcome: str  # "returned", "raised", "died" or "hung"
    value: object = None
    message: str = ""
    details: str = ""
    imported: tuple = ()  # names of modules


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung. `reports` has the report of every rank."""

    def __init__(self, reports):
        self.reports = reports
        ranks_by_fault = {}
        for report in reports:
            if report.outcome != "returned":
                ranks_by_fault.setdefault((report.message, report.details), []).append(report.rank)
        faults = ranks_by_fault.items()
        super().__init__("\n".join(f"rank {ranks}: {message}\n{details}" for (message, details), ranks in faults))


def workers(world, timeout=WATCHDOG_SECONDS):
    return Workers(world, timeout)


@dataclass(frozen=True)
class Workers:
    world: int
    timeout: float = WATCHDOG_SECONDS

    def run(self, function, *args, **kwargs):
        """Run `function(*args, **kwargs)` on every rank; the list of results by rank. Raises RanksFailed."""
        reports = self._reports(function, args, kwargs, patient=False)
        if any(report.outcome != "returned" for report in reports):
            raise RanksFailed(reports)
        return [report.value for report in reports]

    def run_expecting_error(self, function, match, *args, dying=(), **kwargs):
        """Assert that every rank raises an error whose message matches the regex `match`; the messages by rank.

        Ranks that have raised stay alive until all have, so that a closed connection does not end a hang of another rank.
        Ranks in `dying` must end without a report instead.
        """
        reports = self._reports(function, args, kwargs, patient=True)
        unexpected = [r for r in reports if r.outcome != ("died" if r.rank in dying else "raised")]
        if unexpected:
            outcomes = {report.rank: report.outcome for report in reports}
            raise AssertionError(f"every rank should have raised {match!r}, but: {outcomes}\n{RanksFailed(reports)}")
        wrong = [report for report in reports if report.outcome == "raised" and not re.search(match, report.message)]
        if wrong:
            raise AssertionError(f"no match for {match!r}\n{RanksFailed(wrong)}")
        return [report.message for report in reports]

    def _reports(self, function, args, kwargs, patient):
        import_everything_once()
        with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
            ranks = []
            try:
                for rank in range(self.world):
                    ranks.append(_fork(rank, self.world, Path(folder), lambda: function(*args, **kwargs)))
                reports = _collect(ranks, self.timeout, patient)
            finally:
                for rank in ranks:
                    rank.end()
        import_for_later_ranks(reports[0].imported)
        return reports


class _Rank:
    """Handle of a forked rank in the parent process."""

    def __init__(self, rank, pid, connection, stack_file):
        self.rank, self.pid, self.connection, self.stack_file = rank, pid, connection, stack_file
        self.exit_status = None

    def receive(self):
        try:
            return pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.wait_for_exit(5)
            return Report(
                self.rank,
                "died",
                message=f"died without a report, {self._how_it_ended()}",
                details=self.stack(),
            )

    def stack(self):
        text = self.stack_file.read_text() if self.stack_file.exists() else ""
        return text.partition("_be_a_rank")[0].rpartition("\n")[0]  # the frames below belong to pytest

    def dump_stack(self):
        if self.exit_status is None:
            os.kill(self.pid, signal.SIGUSR1)

    def release(self):
        try:
            self.connection.send_bytes(b"go")
        except OSError:
            pass  # it has ended already

    def wait_for_exit(self, seconds):
        deadline = time.monotonic() + seconds
        while self.exit_status is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_status = status
            else:
                time.sleep(0.005)
        return self.exit_status is not None

    def end(self):
        if self.exit_status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait_for_exit(10)
        self.connection.close()

    def _how_it_ended(self):
        if self.exit_status is None:
            return "its connection closed"
        code = os.waitstatus_to_exitcode(self.exit_status)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _collect(ranks, timeout, patient):
    """Wait for one report per rank. Ranks that do not report in time dump their stack instead."""
    reports = {}
    deadline = time.monotonic() + timeout
    while len(reports) < len(ranks):
        waiting = {rank.connection: rank for rank in ranks if rank.rank not in reports}
        ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
        if not ready:
            _report_stacks(waiting.values(), reports, timeout)
            break
        for connection in ready:
            report = waiting[connection].receive()
            reports[report.rank] = report
            if report.outcome != "returned" and not patient:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if all(report.outcome == "returned" for report in reports.values()):
        for rank in ranks:
            rank.release()
        for rank in ranks:
            if not rank.wait_for_exit(10):
                rank.dump_stack()
                time.sleep(0.3)
                message = "returned a result, then did not exit"
                reports[rank.rank] = Report(rank.rank, "hung", message=message, details=rank.stack())
    return [reports[rank.rank] for rank in ranks]


def _report_stacks(silent, reports, timeout):
    for rank in silent:
        rank.dump_stack()
    time.sleep(0.3)
    failed_first = any(report.outcome != "returned" for report in reports.values())
    reason = "was still waiting after another rank failed" if failed_first else f"hung for {timeout:g} s"
    for rank in silent:
        reports[rank.rank] = Report(rank.rank, "hung", message=reason, details=rank.stack())


def _fork(rank, world, folder, function):
    ours, theirs = Pipe()
    stack_file = folder / f"stack_{rank}"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _be_a_rank(rank, world, folder, stack_file, theirs, function)
        finally:
            os._exit(70)  # never return into pytest
    theirs.close()
    return _Rank(rank, pid, ours, stack_file)


def _be_a_rank(rank, world, folder, stack_file, connection, function):
    with open(stack_file, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        faulthandler.dump_traceback_later(10 * WATCHDOG_SECONDS, exit=True)  # in case the parent dies
        before = set(sys.modules)
        try:
            _join_the_world(rank, world, folder)
            report = pickle.dumps(Report(rank, "returned", function(), imported=_imported_since(before)))
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            report = pickle.dumps(Report(rank, "raised", message=message, details=traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(report)
        connection.recv_bytes()  # all ranks are done
        _leave_the_world()
        os._exit(0)


def _join_the_world(rank, world, folder):
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # no port is used: the store is a file
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, verbose=False)


def _imported_since(before):
    """Names of the modules of installed packages that this process has imported since. Modules created by tests are excluded."""
    new = [(name, module) for name, module in sys.modules.items() if name not in before]
    return tuple(name for name, module in new if "site-packages" in (getattr(module, "__file__", None) or ""))


def import_for_later_ranks(names):
    """Import in this process what a rank has imported, which saves the ranks of later calls the time."""
    for name in names:
        with contextlib.suppress(Exception):  # may be importable only in the state of the rank
            importlib.import_module(name)


def _leave_the_world():
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def import_everything_once():
    """Import what ranks would otherwise import after each fork, and freeze the heap of the garbage collector.

    Without :func:`gc.freeze` each collection in a rank would visit all objects of the parent and copy their memory pages.
    """
    if "harness.warm" in sys.modules:
        return
    import deepspeed.ops
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer
    import torch
    import transformers.trainer  # noqa: F401

    import ds_cp.patches

    for package in (ds_cp, ds_cp.patches):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    ds_cp.patches.versions.check()  # caches the versions of installed packages
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a C++ build that no test needs
    gc.collect()
    gc.freeze()
    sys.modules["harness.warm"] = sys.modules[__name__]
