"""Why memory ran out, and what would help, from the figures of the failure alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memopt.core.units import format_bytes

# A batch counts as unusual if it is so much larger than the median and than any other.
_UNUSUAL_MEDIAN, _UNUSUAL_MAX = 1.2, 1.02
_SHARE_OF_OTHERS = 0.05
# Some memory is always cached; so much of what is reserved isn't usual.
_SHARE_IN_PIECES = 0.1
_MAX_PARTS = 64

SINGLE_REQUEST = "single request larger than the device"
FRAGMENTATION = "fragmentation"
UNUSUAL_BATCH = "an unusually large batch"
GROWTH = "growth over time"
OTHER_PROCESS = "another process"
STEADY_NEED = "steady need too large"


@dataclass(frozen=True)
class Failure:
    """The figures of a failure; sizes in bytes, `None` is unknown.

    Attributes:
        phase: What was going on.
        requested: What was asked for.
        limit: What this process might use at most if it were alone on the device.
        total: What the device has.
        allocated: In use by tensors of this process.
        reserved: Held by this process.
        others: Held by everyone else, and by drivers.
        free: Free on the device.
        activations: Kept for backward.
        float32_activations: Those of them in float32.
        in_blocks: Those of them in the blocks that `GradientCheckpointing` would choose.
        largest_block: The largest of these blocks.
        parameters: Of the model.
        evaluated: Allocated beyond what training holds between steps, in an evaluation.
        grown: By how much memory had grown steadily.
        growth_rate: Bytes that it grew each step.
        batch: Elements in the batch at hand.
        usual_batch: Median elements of the batches before.
        largest_batch: Most elements of a batch before.
        in_use: Names of the callbacks that are in use already.
        is_half: Whether training computes in half precision already.
        is_expandable: Whether the allocator's segments can grow already.
        is_cpu: Whether the device is the CPU.
    """

    phase: str | None
    requested: int | None
    limit: int | None
    total: int | None
    allocated: int
    reserved: int
    others: int
    free: int | None
    activations: int = 0
    float32_activations: int = 0
    in_blocks: int = 0
    largest_block: int = 0
    parameters: int = 0
    evaluated: int = 0
    grown: int = 0
    growth_rate: float = 0.0
    batch: int | None = None
    usual_batch: int | None = None
    largest_batch: int | None = None
    in_use: frozenset[str] = frozenset()
    is_half: bool = False
    is_expandable: bool = False
    is_cpu: bool = False

    @property
    def cached(self) -> int:
        """Bytes that the allocator holds without use."""
        return max(0, self.reserved - self.allocated)

    @property
    def is_evaluation(self) -> bool:
        """Whether it failed outside of training steps."""
        return self.phase in {"validation", "test", "predict"}


@dataclass(frozen=True)
class Advice:
    """One thing to do.

    Attributes:
        action: What to do.
        saves: Bytes it would save, at most.
        costs: What it costs.
    """

    action: str
    saves: int
    costs: str


def likely_kind(failure: Failure) -> tuple[str, str]:
    """Return the likely kind of a failure in a few words, and the figures that speak for it."""
    asked, limit = failure.requested or 0, failure.limit
    if limit is not None and asked > limit:
        return (
            SINGLE_REQUEST,
            f"{format_bytes(asked)} were asked for at once, of {format_bytes(limit)} that this "
            "process may use at all",
        )
    if asked and failure.cached >= max(asked, _SHARE_IN_PIECES * failure.reserved):
        return (
            FRAGMENTATION,
            f"{format_bytes(failure.cached)} are cached and unused, more than the "
            f"{format_bytes(asked)} asked for, but in pieces",
        )
    if _is_unusual(failure):
        return (
            UNUSUAL_BATCH,
            f"it has {failure.batch:,} elements, the median before it {failure.usual_batch:,}",
        )
    if failure.grown and failure.grown >= min(asked or failure.grown, failure.allocated // 10):
        return (
            GROWTH,
            f"{format_bytes(failure.grown)} were added steadily, "
            f"{format_bytes(failure.growth_rate * 100)} in 100 steps",
        )
    if _is_crowded_out(failure):
        return (
            OTHER_PROCESS,
            f"others hold {format_bytes(failure.others)} of the device's "
            f"{format_bytes(failure.total or 0)}; without them the request would have fitted",
        )
    return (
        STEADY_NEED,
        f"{format_bytes(failure.allocated)} in use and {format_bytes(asked)} asked for"
        + ("" if limit is None else f", of {format_bytes(limit)} that this process may use"),
    )


def advice_on(failure: Failure) -> list[Advice]:
    """Return what to do, in order of cost: first what is free, then what takes time or accuracy."""
    return list(_advice_on(failure))


def _advice_on(failure: Failure) -> Iterator[Advice]:
    kind, _ = likely_kind(failure)
    if kind == GROWTH:
        yield Advice("free what grows (see `MemoryGrowthWarning`)", failure.grown, "nothing")
    if kind == OTHER_PROCESS:
        yield Advice("end the other processes, or move to a free device", failure.others, "nothing")
    if kind == FRAGMENTATION and not failure.is_cpu:
        if not failure.is_expandable:
            action = "set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before Python starts"
            yield Advice(action, failure.cached, "nothing")
        if "EmptyCache" not in failure.in_use:
            yield Advice("`EmptyCache()`", failure.cached, "a wait for the device a call")
    if failure.is_evaluation:
        if failure.evaluated:
            action = f"halve the batch size of the {failure.phase} loader"
            yield Advice(action, failure.evaluated // 2, "nothing to speak of")
        return
    if failure.phase == "optimizer step" and failure.parameters and not failure.is_cpu:
        action = "`foreach=False` (or `fused=True`) in the optimizer, whose step then needs less"
        yield Advice(action, failure.parameters, "a slower optimizer step, unless fused")
    yield from _advice_on_activations(failure, kind)


def _advice_on_activations(failure: Failure, kind: str) -> Iterator[Advice]:
    if failure.float32_activations and not failure.is_half:
        yield Advice(
            '`AutomaticMixedPrecision()`, or `Trainer(precision="bf16-mixed")`',
            failure.float32_activations // 2,
            "the accuracy of half precision",
        )
    divisible = failure.activations
    if kind == SINGLE_REQUEST:
        divisible += failure.requested or 0  # it may be made of the batch, too
    if divisible and failure.phase in {"forward", "backward"}:
        parts = _parts_needed(failure, divisible)
        if "AutoAccumulation" not in failure.in_use:
            action = f"`AutoAccumulation()`: a batch in {parts} parts, or as many as it takes"
            if kind == SINGLE_REQUEST:
                action += ", if that request grows with the batch"
            yield Advice(action, divisible - divisible // parts, "the time of smaller batches")
    saved = failure.in_blocks - failure.largest_block
    if saved > 0 and "GradientCheckpointing" not in failure.in_use:
        yield Advice("`GradientCheckpointing()`", saved, "up to a third of the step's time")


def _parts_needed(failure: Failure, divisible: int) -> int:
    """Return the fewest parts of a batch that would have made room for what was asked for."""
    if failure.limit is None:
        return 2
    missing = failure.allocated + (failure.requested or 0) - failure.limit
    enough = (parts for parts in range(2, _MAX_PARTS) if divisible * (1 - 1 / parts) >= missing)
    return next(enough, 2)


def _is_unusual(failure: Failure) -> bool:
    if failure.batch is None or not failure.usual_batch or not failure.largest_batch:
        return False
    return (
        failure.batch >= _UNUSUAL_MEDIAN * failure.usual_batch
        and failure.batch >= _UNUSUAL_MAX * failure.largest_batch
    )


def _is_crowded_out(failure: Failure) -> bool:
    if failure.requested is None or not failure.total or not failure.limit:
        return False
    is_much = failure.others > _SHARE_OF_OTHERS * failure.total
    is_short = failure.requested > (failure.free or 0)
    return is_much and is_short and failure.allocated + failure.requested <= failure.limit
