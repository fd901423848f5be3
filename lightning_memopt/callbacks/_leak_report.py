"""What `MemoryMonitor` says of a leak: how fast, until when, who, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memopt.core.growth import Growth
from lightning_memopt.core.tensor_census import CensusChange
from lightning_memopt.core.tensor_holders import GrownHolder
from lightning_memopt.core.units import MIB, format_bytes

_MAX_NAMED = 3
_MANY_STEPS = 10**9


def describe_growth(growth: Growth, limit: int | None, peak: int) -> str:
    """Say how fast memory grows and when it is full.

    Args:
        growth: The growth.
        limit: Bytes that this process may use, `None` if that is unknown.
        peak: Bytes in use at the peak of the last step.
    """
    rate = growth.bytes_per_step
    text = (
        f"memory at the end of a step has grown steadily since step {growth.since_step}: "
        f"{rate * 100 / MIB:+.2f} MiB per 100 steps"
    )
    if limit is None:
        return text
    full = growth.until_step + max(0, limit - peak) / rate
    when = f"around step {full:,.0f}" if full < _MANY_STEPS else "in more than 10^9 steps"
    return f"{text}, which would reach the limit of {format_bytes(limit)} {when}"


def describe_holders(
    holders: Sequence[GrownHolder], since: int, callbacks: Sequence[str], epoch: str
) -> str:
    """Say who holds it and what to do.

    Args:
        holders: What grew, the worst first.
        since: The step of the first look.
        callbacks: Names of the roots that are callbacks.
        epoch: Half a sentence on the end of the epoch, or nothing.
    """
    named = [_describe(holder, callbacks) for holder in holders[:_MAX_NAMED]]
    more = f" and {len(holders) - _MAX_NAMED} more" if len(holders) > _MAX_NAMED else ""
    # Everything with a graph comes first.
    return (
        f"Since step {since} more is held by {'; '.join(named)}{more}. {_advice(holders[0], epoch)}"
    )


def describe_census(change: CensusChange | None, since: int, step: int) -> str:
    """Say what is known when no attribute holds it.

    Args:
        change: What there is more of.
        since: The step of the first census.
        step: The step of the second.
    """
    if change is None:
        return (
            f"There is no tensor more than at step {since}: look for NumPy arrays, for buffers of "
            "other libraries, and for tensors that C++ code keeps."
        )
    shape = "x".join(map(str, change.shape)) or "scalar"
    text = (
        f"No attribute holds it: since step {since} there are {change.more_tensors} tensors more, "
        f"most of their bytes in {change.dtype} of shape {shape}"
    )
    if change.old_with_graph:
        text += f", and {change.old_with_graph} have a graph older than {step - since} steps"
    if change.holders:
        return f"{text}; longer became {', '.join(change.holders)}."
    return f"{text}. Look for closures, generators and caches that keep them."


def _describe(holder: GrownHolder, callbacks: Sequence[str]) -> str:
    now, name = holder.now, holder.name
    if now.file:
        label = f"global `{name.removesuffix(f' of {now.file}')}` of {now.file}"
    elif now.is_metric:
        label = f"metric `{name}`"
    else:
        is_of_callback = name.split(".")[0].split("[")[0] in callbacks
        label = f"callback `{name}`" if is_of_callback else f"`{name}`"
    if now.kind == "Tensor":
        if holder.has_more_graph:
            what = f"a graph of {now.graph_nodes:,} nodes, {holder.more_graph_nodes:,} more"
        else:
            what = f"a tensor of {format_bytes(now.bytes)}, {format_bytes(holder.more_bytes)} more"
        return f"{label} ({what})"
    graph = " with a graph" if holder.has_more_graph else ""
    what = f"{now.kind} of {now.tensors:,} tensors{graph}, {holder.more_tensors:,} more"
    return f"{label} ({what}, {format_bytes(now.bytes)})"


def _advice(holder: GrownHolder, epoch: str) -> str:
    now = holder.now
    if holder.has_more_graph:
        return (
            "Keep `.detach()`ed tensors, or numbers by `.item()`: a graph keeps all it came from."
        )
    if now.is_metric:
        return f"Call its `reset()` when an epoch ends, or use a metric that keeps no lists{epoch}."
    if now.kind == "Tensor":
        return "Let it keep its size, or move it to the CPU."
    if now.kind == "dict":
        return f"Bound it if it is a cache, or empty it{epoch}."
    return f"Empty it when it has been used, or bound it with `deque(maxlen=...)`{epoch}."
