"""What a report says against a run, as sentences; ``tables.py`` says what is allowed."""

from __future__ import annotations

from typing import Any, Iterator

from rehearsal import tables

COUNTED = ("forward", "backward")
"""Phases that belong to ds_cp and the model; the others are DeepSpeed's, the scenario's or come once."""


def problems(report: dict[str, Any]) -> list[str]:
    """All that a rehearsal has to say against a case, without bounds."""
    if report["error"]:
        return [f"error: {report['error']}\n{report.get('traceback', '')}"]
    return [*_faults(report), *_waits(report), *_host_tensors(report)]


def _faults(report: dict[str, Any]) -> Iterator[str]:
    for kind, what, place, number in report["faults"]:
        yield f"{kind}: {what}, at {place}, {number} times"


def _waits(report: dict[str, Any]) -> Iterator[str]:
    for phase, what, place, number in report["waits"]:
        ours = phase.removeprefix("first ") in COUNTED and not place.startswith("deepspeed/")
        most = tables.HOST_WAITS.get(place, (0, ""))[0]
        if ours and place not in tables.OF_TRANSFORMERS and number > most:
            yield f"wait: {phase}, {what}, {place}, {number} times"


def _host_tensors(report: dict[str, Any]) -> Iterator[str]:
    for phase, place, number in report["host_tensors"]:
        if place.split(":")[0] not in tables.HOST_TENSORS:
            yield f"host tensor: {place}, {phase}, {number} times"


def over_bounds(report: dict[str, Any]) -> list[str]:
    """Launches and bytes above the bounds of an engine's case."""
    found = []
    for phase, most in zip(COUNTED, tables.most_launches(report["case"]), strict=True):
        operations = report["launches"].get(phase, {})
        if not 0 < sum(operations.values()) <= most:
            said = ", ".join(f"{name} {n}" for name, n in sorted(operations.items(), key=lambda pair: -pair[1]))
            found.append(f"launches: {sum(operations.values())} in a layer's {phase} pass, at most {most}: {said}")
    for where, most in tables.most_bytes(report["case"]).items():
        peak = report["peak"][where] - report["weights"]
        if not 0 < peak <= most:
            at = report["peak_at"].get(where)
            found.append(f"bytes: {peak >> 20} MiB {where}, at most {most >> 20}; the peak is in {at}")
    return found


def attention_calls(report: dict[str, Any]) -> dict[str, int]:
    """How often the kernel of the case ran in the layer whose launches were counted."""
    of_phase = {}
    for phase in COUNTED:
        operations = report["launches"].get(phase, {})
        of_phase[phase] = sum(n for name, n in operations.items() if "flash" in name)
    return of_phase
