"""The report of a failure as one page of plain text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from lightning_memopt.core.oom_diagnosis import advice_on, likely_kind
from lightning_memopt.core.oom_findings import Findings
from lightning_memopt.core.recent_steps import StepRecord
from lightning_memopt.core.units import format_bytes

_BARS = "▁▂▃▄▅▆▇█"
_MAX_PROCESSES = 3
_MAX_MODULES = 10
_WIDTH = 10
_NAMES = 13


def report_text(findings: Findings, where: str, machine: str, files: Iterable[str]) -> str:
    """Return the report.

    Args:
        findings: What was found out.
        where: Step, epoch and rank, in words.
        machine: Device and versions, in words.
        files: What else was written.
    """
    return "\n".join(
        [
            f"Out of memory {where}",
            machine,
            "",
            *_request(findings),
            "",
            *_device(findings),
            "",
            *_held(findings),
            "",
            "The largest live allocations",
            *(_sized(size, text) for size, text in findings.largest),
            "",
            *_collections(findings),
            *_curve(findings.recent.steps, is_cpu=findings.failure.is_cpu),
            *_batches(findings),
            "",
            *_advice(findings),
            "",
            *(f"Not found out, {each}" for each in findings.missing),
            *files,
            "",
        ]
    )


def _request(findings: Findings) -> Iterator[str]:
    failure, place = findings.failure, findings.place
    kind, reason = likely_kind(failure)
    asked = "unknown" if failure.requested is None else format_bytes(failure.requested)
    yield _wrapped("error", findings.error)
    yield f"asked for    {asked}"
    yield f"phase        {failure.phase or 'outside of a step'}"
    if place.own is not None:
        yield f"your line    {place.own}"
    if place.line is not None and place.line != place.own:
        yield f"within       {place.line}"
    if place.module is not None:
        yield f"module       {place.module}"
    if findings.backward:
        yield f"backward     had come to {findings.backward}"
    yield _wrapped("likely kind", f"{kind}: {reason}")


def _device(findings: Findings) -> Iterator[str]:
    failure = findings.failure
    yield "The device" + (f", {format_bytes(failure.total)}" if failure.total else "")
    if failure.is_cpu:
        yield _sized(failure.reserved, "this process (resident)")
        yield _sized(failure.others, "other processes")
    else:
        yield _sized(failure.allocated, "allocated: tensors of this process")
        yield _sized(failure.cached, "cached: held by this process, unused")
        yield _sized(failure.others, "other processes and drivers' contexts")
    if failure.free is not None:
        yield _sized(failure.free, "free")
    if failure.limit is not None and failure.limit != failure.total:
        yield _sized(failure.limit, "is the most that this process may use")
    for process in findings.processes[:_MAX_PROCESSES]:
        mine = " (this one)" if process.pid == os.getpid() else ""
        yield _sized(process.used, f"of it by process {process.pid}{mine}, {process.name}")


def _held(findings: Findings) -> Iterator[str]:
    yield f"What holds the {format_bytes(findings.failure.allocated)} in use"
    for kind, size in findings.held.items():
        if kind == "other":
            what = "Python and its libraries" if findings.failure.is_cpu else "temporaries"
            kind = f"other, such as {what}"
        yield _sized(size, kind)
        if kind == "activations":
            for module, of_module in findings.activations[:_MAX_MODULES]:
                yield "    " + _sized(of_module, module or "before any module with parameters")
            rest = sum(size for _, size in findings.activations[_MAX_MODULES:])
            if rest:
                yield "    " + _sized(rest, "in other modules")


def _collections(findings: Findings) -> Iterator[str]:
    if findings.collections:
        yield "Memory grew; attributes that hold several tensors, or their graphs"
        yield from (_sized(size, text) for size, text in findings.collections)
        yield ""


def _curve(steps: Sequence[StepRecord], is_cpu: bool) -> Iterator[str]:
    if not steps:
        yield "No step had ended before"
        return
    peaks = [record.peak for record in steps]
    least, most = min(peaks), max(peaks)
    span = max(most - least, 1)
    bars = "".join(_BARS[(peak - least) * (len(_BARS) - 1) // span] for peak in peaks)
    figure = "Resident memory after each" if is_cpu else "Peak of each"
    of = f"steps, {steps[0].step} to {steps[-1].step}" if len(steps) > 1 else "step"
    yield f"{figure} of the last {len(steps)} {of}"
    yield f"  {bars}  {format_bytes(least)} to {format_bytes(most)}"
    first, last = steps[0].allocated, steps[-1].allocated
    yield f"  in use between steps: {format_bytes(first)} at first, {format_bytes(last)} at last"


def _batches(findings: Findings) -> Iterator[str]:
    if findings.recent.batch:
        yield f"This batch: {findings.recent.batch}"
        usual = findings.recent.usual_batch()
        yield f"Usual ones: {usual}" if usual else "It was the first of its kind"


def _advice(findings: Findings) -> Iterator[str]:
    advice = advice_on(findings.failure)
    if not advice:
        yield "No callback of the suite is known to help here: make the model or its inputs smaller"
        return
    yield "What to do, cheapest first"
    for number, each in enumerate(advice, 1):
        yield f"  {number}. {each.action}"
        yield f"     saves up to {format_bytes(each.saves)}, costs {each.costs}"


def _wrapped(name: str, text: str) -> str:
    return textwrap.fill(
        text, 100, initial_indent=f"{name:<{_NAMES}}", subsequent_indent=" " * _NAMES
    )


def _sized(size: int, text: str) -> str:
    return f"  {format_bytes(size):>{_WIDTH}}  {text}"
