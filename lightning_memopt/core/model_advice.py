"""What would save most of a step's peak: changes that were traced, each with figure and price."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_memopt.core.anatomy import read_anatomy
from lightning_memopt.core.flops import Flops
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.memory_trace import MemoryTrace
from lightning_memopt.core.model_variants import output_head, variants_of
from lightning_memopt.core.traced_copy import Plan, trace_copy

_LEAST = 0.01  # share of the peak that a piece of advice saves at least
_MOST = 6
_FAR = 0.1
_CHUNKS = 8
_WIDE = 4  # times as many outputs as inputs has the head of a vocabulary
_STEPS = 2  # that are traced
_SHIFTED = 0.9  # share of the tokens that a loss sees at least, where it leaves some out


@dataclass(frozen=True)
class Advice:
    """A change that saves memory.

    Attributes:
        what: What to change.
        saved: Bytes by which the peak falls.
        price: What it costs, with its figure.
        how: How to do it.
    """

    what: str
    saved: int
    price: str
    how: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {
            "what": self.what,
            "saved_bytes": self.saved,
            "price": self.price,
            "how": self.how,
        }


def advise(
    plan: Plan,
    size: int | None,
    library_bytes: int = 0,
    peak: int | None = None,
    time_limit: float | None = None,
) -> list[Advice]:
    """Return what would save most of the peak of a step, largest first; at most six.

    Each change is traced on a copy that has no memory, and what saves less than 1 % is left out.

    Args:
        plan: The training.
        size: Samples of a micro-batch.
        library_bytes: Bytes of a cuBLAS workspace.
        peak: A peak that was measured; where the trace is far from it there is no advice, as the
            training does what the plan doesn't say.
        time_limit: Seconds after which no other change is tried.
    """
    begin = time.monotonic()
    optimizer = plan.optimizer
    if isinstance(optimizer, Optimizer):  # which belongs to modules that will be replaced
        made, defaults = type(optimizer), optimizer.defaults
        plan = dataclasses.replace(plan, optimizer=lambda parameters: made(parameters, **defaults))
    tried = _Trials(plan, size, library_bytes)
    if peak is not None and abs(tried.base.peak - peak) > _FAR * peak:
        return []
    found = []
    for trial in (*_of_training(tried), *_of_chunks(tried), *_of_model(tried)):
        if time_limit is not None and time.monotonic() - begin > time_limit:
            break
        with suppress(Exception):  # a change that this model doesn't take
            found.append(trial())
    least = _LEAST * tried.base.peak
    best = sorted((each for each in found if each.saved >= least), key=lambda each: -each.saved)
    return best[:_MOST]


@dataclass(frozen=True)
class _Traced:
    """A step that was traced; `parameters` is their number, `flops` that of a step."""

    trace: MemoryTrace
    peak: int
    flops: int
    parameters: int


class _Trials:
    """Traces changes of a training beside the training itself."""

    def __init__(self, plan: Plan, size: int | None, library_bytes: int) -> None:
        self.plan, self.size, self._library_bytes = plan, size, library_bytes
        self.base = self.trace(plan, size)

    def trace(
        self, plan: Plan, size: int | None, change: Callable[[nn.Module], object] | None = None
    ) -> _Traced:
        """Trace a training."""
        parameters = 0

        def changed(module: nn.Module) -> None:
            nonlocal parameters
            if change is not None:
                change(module)
            parameters = sum(each.numel() for each in module.parameters())

        flops = Flops()
        trace = trace_copy(plan, size, changed, flops)
        return _Traced(trace, self.peak_of(trace), flops.total // _STEPS, parameters)

    def peak_of(self, trace: MemoryTrace) -> int:
        """Return the peak of a trace."""
        on_cuda = self.plan.on_cuda
        return read_anatomy(trace, on_cuda, library_bytes=self._library_bytes * on_cuda).peak

    def advice(
        self,
        what: str,
        how: str,
        price: str = "",
        change: Callable[[nn.Module], object] | None = None,
        size: int | None = None,
        **changes: Any,
    ) -> Callable[[], Advice]:
        """Return what traces a change; without a price its is what it adds to work and weights."""

        def run() -> Advice:
            plan = dataclasses.replace(self.plan, **changes)
            traced = self.trace(plan, self.size if size is None else size, change)
            return Advice(what, self.base.peak - traced.peak, price or self._price(traced), how)

        return run

    def _price(self, traced: _Traced) -> str:
        more = traced.flops / self.base.flops - 1 if self.base.flops else 0.0
        price = f"{more * 100:+.0f} % FLOPs"
        if traced.parameters == self.base.parameters:
            return price
        before, after = self.base.parameters / 1e6, traced.parameters / 1e6
        return f"{price}, {after:.2f} M parameters instead of {before:.2f} M: train anew"


def _of_training(tried: _Trials) -> Iterator[Callable[[], Advice]]:
    plan, size = tried.plan, tried.size
    if plan.checkpoint is None:
        with suppress(ValueError):  # no repeated blocks
            names = select_layers(plan.module)
            for every, which, how in (
                (1, "all", "`GradientCheckpointing()`"),
                (2, "every second of", "`GradientCheckpointing(every=2)`"),
            ):
                what = f"checkpoint {which} {len(names)} blocks"
                yield tried.advice(what, how, checkpoint=names[::every])
    if plan.precision == "32-true":
        price = "products in 8 significant bits instead of 24"
        how = "`AutomaticMixedPrecision()`"
        yield tried.advice("bf16 in mixed precision", how, price, precision="bf16-mixed")
    for parts in (2, 4):
        if size is not None and size >= parts:
            part = -(-size // parts)
            price = f"{parts} passes a step, of {part} sample{'' if part == 1 else 's'} each"
            how = f"`AutoAccumulation(micro_batch_size={part})`"
            what = f"split the micro-batch in {parts}"
            yield tried.advice(what, how, price, size=part, accumulates=True)
    if plan.on_cuda:
        price = "none: one kernel for all parameters"
        yield tried.advice("a fused optimizer", "`fused=True`", price, foreach=False)
    yield tried.advice(
        "SGD with momentum",
        "`torch.optim.SGD(momentum=0.9)`",
        "one state of a parameter; find the learning rate anew",
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    )


def _of_model(tried: _Trials) -> Iterator[Callable[[], Advice]]:
    for variant in variants_of(tried.plan.module):
        yield tried.advice(variant.what, variant.how, change=variant.change)


def _of_chunks(tried: _Trials) -> Iterator[Callable[[], Advice]]:
    """An output head and its loss over a part of the tokens after the other.

    The figure is that of the same trace with an eighth of each tensor as large as the logits.
    """
    head = output_head(tried.plan.module)
    if head is None:
        return
    name, linear = head
    width = linear.out_features
    if width < _WIDE * linear.in_features:
        return
    lifetimes = tried.base.trace.lifetimes
    made = [_elements(x) // width for x in lifetimes if x.module == name and not x.is_frozen
            and x.phase == "forward" and _elements(x) % width == 0]  # fmt: skip
    if not made:
        return
    tokens = max(made)

    def run() -> Advice:
        trace = copy.copy(tried.base.trace)
        trace.lifetimes = [
            dataclasses.replace(x, size=x.size // _CHUNKS)
            if _elements(x) % width == 0 and _SHIFTED * tokens <= _elements(x) / width <= tokens
            and x.operator
            else x
            for x in lifetimes
        ]  # fmt: skip
        again = 2 * tokens * width * linear.in_features
        more = again / tried.base.flops * 100 if tried.base.flops else 0.0
        return Advice(
            f"`{name}` and its loss in {_CHUNKS} chunks",
            tried.base.peak - tried.peak_of(trace),
            f"{more:+.0f} % FLOPs, as logits are computed twice",
            "`torch.utils.checkpoint` of head and loss for each chunk (arXiv 2411.09009)",
        )

    yield run


def _elements(lifetime: Any) -> int:
    size: int = lifetime.size // torch.empty((), dtype=lifetime.dtype).element_size()
    return size
