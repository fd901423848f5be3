"""The figures of a run, and what changed from one run to another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from lightning_memopt.commands._runs import Curve, Run
from lightning_memopt.core.units import GIB, format_bytes

Kind = Literal["bytes", "count", "rate", "time", "number"]

Pick = Callable[[Curve], "tuple[float, int | None] | None"]

PHASES = ("forward", "backward", "optimizer")
_STAGES = {"val": "validation", "test": "test", "predict": "predict"}
_LOSS = re.compile(r"loss|nll|perplexity|ppl|error", re.IGNORECASE)
_MAX_WHOLE = 10**9  # up to which a number is written in full
# Their x isn't the step that trains.
_NO_CLOCK = ("memory_val/", "memory_test/", "memory_predict/", "memory_ranks/", "accumulation/")


@dataclass(frozen=True)
class Figure:
    """One figure of a run.

    Attributes:
        key: Its name in JSON.
        label: Its name for people.
        value: The figure; sizes in bytes.
        kind: What it counts.
        at: Its place on the x axis.
        axis: What the x axis counts.
    """

    key: str
    label: str
    value: float
    kind: Kind
    at: int | None = None
    axis: str = "step"


@dataclass(frozen=True)
class Change:
    """A figure of two runs; `None` where a run hasn't got it."""

    key: str
    label: str
    kind: Kind
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        """How much more the second has."""
        if self.first is None or self.second is None:
            return None
        return self.second - self.first

    @property
    def share(self) -> float | None:
        """How much more the second has, as a share of the first."""
        return (
            self.difference / abs(self.first)
            if self.first and self.difference is not None
            else None
        )


def figures_of(run: Run) -> list[Figure]:
    """Return the figures that a run has, without its losses."""
    found: list[Figure] = []

    def add(key: str, label: str, tag: str, pick: Pick, kind: Kind, axis: str = "step") -> None:
        curve = run.curves.get(tag)
        picked = pick(curve) if curve is not None else None
        if picked is None:
            return
        value, at = picked
        if kind != "bytes":
            at = None  # the place of a count's last point says nothing
        if kind == "bytes":
            value = round(value * GIB)
        elif kind == "count":
            value = round(value)
        found.append(Figure(key, label, value, kind, at, axis))

    add("peak_allocated_bytes", "peak allocated", "memory/peak_allocated_gib", _highest, "bytes")
    add("peak_reserved_bytes", "highest reserved", "memory/reserved_gib", _highest, "bytes")
    add("end_allocated_bytes", "allocated at the end", "memory/allocated_gib", _last, "bytes")
    for phase in PHASES:
        tag = f"memory_phase/{phase}_peak_gib"
        add(f"{phase}_peak_bytes", f"peak of {phase}", tag, _highest, "bytes")
    for stage, name in _STAGES.items():
        tag = f"memory_{stage}/peak_allocated_gib"
        add(f"{name}_peak_bytes", f"peak of {name}", tag, _highest, "bytes", "batch")
    ranks = "memory_ranks/peak"
    then = _when_highest(run.curves.get(f"{ranks}_max_gib"))
    add("ranks_peak_max_bytes", "highest rank's peak", f"{ranks}_max_gib", then, "bytes")
    add("ranks_peak_min_bytes", "lowest rank's peak then", f"{ranks}_min_gib", then, "bytes")
    add("ranks_peak_max_rank", "highest rank", f"{ranks}_max_rank", then, "count")
    add("alloc_retries", "allocator retries", "memory/alloc_retries", _last, "count")
    rate = steps_per_second(run)
    if rate is not None:
        found.append(Figure("steps_per_second", "steps per second", rate, "rate"))
    own = "accumulation"
    add("micro_batch_size", "micro-batch size", f"{own}/micro_batch_size", _last, "count")
    add("accumulation_steps", "accumulation steps", f"{own}/steps", _last, "count")
    add("recoveries", "recoveries", f"{own}/recoveries", _last, "count")
    add("amp_scale", "loss scale", "amp/scale", _last, "number")
    add("amp_skipped_steps", "skipped steps", "amp/skipped_steps", _last, "count")
    add("cache_freed_bytes", "cache freed in all", "cache/freed_gib", _sum, "bytes")
    add("cache_empty_ms", "time to free it", "cache/empty_ms", _sum, "time")
    return found


def losses_of(run: Run) -> list[Figure]:
    """Return the last values of what looks like a loss."""
    return [
        Figure(tag, tag, curve.values[-1], "number", curve.steps[-1])
        for tag, curve in sorted(run.curves.items())
        if _LOSS.search(tag) and curve.values
    ]


def training_curve(run: Run) -> Curve | None:
    """Return the curve that tells a run's steps: the monitor's, else the one with most points."""
    curve = run.curves.get("memory/allocated_gib")
    if curve is not None and curve.steps:
        return curve
    others = [
        (tag != "epoch", len(curve.steps), tag)  # which Lightning writes beside all others
        for tag, curve in run.curves.items()
        if curve.steps and not tag.startswith(_NO_CLOCK)
    ]
    return run.curves[max(others)[2]] if others else None


def steps_per_second(run: Run) -> float | None:
    """Return the usual number of optimizer steps a second, whatever pauses there were."""
    curve = training_curve(run)
    if curve is None:
        return None
    points = list(zip(curve.steps, curve.times, strict=True))
    seconds = [
        (time - time_before) / (step - before)
        for (before, time_before), (step, time) in pairwise(points)
        if step > before and time >= time_before
    ]
    usual = median(seconds) if seconds else 0.0
    return 1 / usual if usual > 0 else None


def changes_between(first: Iterable[Figure], second: Iterable[Figure]) -> list[Change]:
    """Return the figures of both, in the order of the first, then what only the second has."""
    before = {figure.key: figure for figure in first}
    after = {figure.key: figure for figure in second}
    return [
        Change(
            figure.key,
            figure.label,
            figure.kind,
            before[key].value if key in before else None,
            after[key].value if key in after else None,
        )
        for key, figure in (before | after).items()
    ]


def format_figure(value: float | None, kind: Kind) -> str:
    """Write a figure for people."""
    if value is None:
        return "-"
    if kind == "bytes":
        return format_bytes(value)
    if kind == "time":
        return f"{value / 1000:,.2f} s" if abs(value) >= 1000 else f"{value:,.1f} ms"
    is_whole = kind == "count" or (value.is_integer() and abs(value) < _MAX_WHOLE)
    return f"{value:,.0f}" if is_whole else f"{value:,.4g}"


def _highest(curve: Curve) -> tuple[float, int] | None:
    known = [position for position, value in enumerate(curve.values) if math.isfinite(value)]
    if not known:
        return None
    position = max(known, key=curve.values.__getitem__)  # the first of equal ones
    return curve.values[position], curve.steps[position]


def _last(curve: Curve) -> tuple[float, int] | None:
    for step, value in zip(reversed(curve.steps), reversed(curve.values), strict=True):
        if math.isfinite(value):
            return value, step
    return None


def _sum(curve: Curve) -> tuple[float, None] | None:
    known = [value for value in curve.values if math.isfinite(value)]
    return (math.fsum(known), None) if known else None


def _when_highest(other: Curve | None) -> Pick:
    """Return what picks the point of the step in which another curve is highest."""

    def pick(curve: Curve) -> tuple[float, int] | None:
        highest = _highest(other) if other is not None else None
        if highest is None or highest[1] not in curve.steps:
            return None
        return curve.values[curve.steps.index(highest[1])], highest[1]

    return pick
