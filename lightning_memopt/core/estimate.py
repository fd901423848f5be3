"""What training a model on a GPU will need, told before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_memopt.core.anatomy import Anatomy, fits, read_anatomy
from lightning_memopt.core.batches import count_samples
from lightning_memopt.core.cards import Card, find_card
from lightning_memopt.core.checks import check_word
from lightning_memopt.core.largest_size import largest_size
from lightning_memopt.core.rough_estimate import rough_anatomy, untraceable
from lightning_memopt.core.traced_copy import Plan, trace_copy
from lightning_memopt.core.training_step import PRECISIONS

STRATEGIES = ("auto", "ddp")


@dataclass(frozen=True)
class Estimate:
    """What a training step is predicted to need.

    Attributes:
        anatomy: The peak and its parts, in bytes.
        device: The device it was made for.
        samples: Samples of a micro-batch, `None` where they can't be told.
        usable: Bytes that PyTorch may reserve on the device, `None` where there is no limit.
        fits: Whether the step runs there, `None` without a limit.
        largest: The most samples of a micro-batch that run there, 0 for none; `None` without a
            limit, and where it isn't known.
        reason: Why the step couldn't be traced, so that the figures are rough; empty if it was.
    """

    anatomy: Anatomy
    device: str
    samples: int | None
    usable: int | None
    fits: bool | None
    largest: int | None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in plain types; sizes are bytes."""
        return {
            "device": self.device,
            "samples": self.samples,
            "usable_bytes": self.usable,
            "fits": self.fits,
            "largest_micro_batch": self.largest,
            "is_rough": bool(self.reason),
            "reason": self.reason,
            **self.anatomy.as_dict(),
        }


def estimate(
    module: nn.Module,
    batch: Any,
    precision: str = "32-true",
    optimizer: Optimizer | str | Callable[[Any], Optimizer] | None = None,
    strategy: str = "auto",
    device: str = "cuda",
    *,
    checkpoint: str | list[str] | None = None,
    micro_batch_size: int | None = None,
) -> Estimate:
    """Predict the peak memory of training on a GPU, without one.

    You gain the peak and its parts, whether it fits a card and the largest micro-batch that does.
    The training step runs twice on a copy of the module whose tensors have shapes but no memory,
    and the lives of all tensors are played through PyTorch's allocator. You pay a few seconds. The
    module is not touched. What values decide (boxes that are left, tokens that are chosen) can't be
    known so: then `reason` says it, and a rough figure is found by running small batches on the
    CPU, or from the weights alone where there is no room for that.

    Args:
        module: A LightningModule, or any module that returns a loss or an output; its weights may
            be on the meta device.
        batch: A batch as its loader gives it; a mapping becomes keyword arguments of a module
            without `training_step`, a tuple or list positional ones. Only shapes and types count.
        precision: One of Lightning's words, such as `"32-true"`, `"bf16-mixed"`, `"bf16-true"`.
        optimizer: The optimizer, the name of one of `torch.optim`, or what makes one from the
            parameters. By default `configure_optimizers` of the module, and `AdamW` where there is
            none.
        strategy: `"auto"` for one device, `"ddp"` for what a rank of several holds.
        device: `"cuda"` for any GPU, a card's name such as `"h200"`, the memory of another such as
            `"24GiB"`, or `"cpu"`.
        checkpoint: Layers that `GradientCheckpointing` would checkpoint: `"auto"`, names or class
            names as in `select_layers`.
        micro_batch_size: Samples of a micro-batch; fewer than the batch has are accumulated, for
            more its samples are repeated. By default the batch is one.

    Returns:
        Sizes in bytes.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A word is unknown, or a layer is no module.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024, device="meta")
        >>> found = estimate(model, torch.ones(8, 1024), optimizer="SGD", device="24GiB")
        >>> found.anatomy.size_of("parameters"), found.fits
        (4198400, True)

    Source: fake tensors, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html.
    """
    check_word("precision", precision, PRECISIONS)
    check_word("strategy", strategy, STRATEGIES)
    card = None if device == "cpu" else find_card(device)
    plan = Plan(module, batch, precision, optimizer, strategy, checkpoint, on_cuda=card is not None)
    samples = count_samples(batch)
    size = samples if micro_batch_size is None else micro_batch_size
    plan.check(size)
    try:
        trace = trace_copy(plan, size)
    except Exception as error:  # whatever a model does that shapes alone can't answer
        return _rough(plan, size, card, untraceable(error, module))
    if card is None:
        return Estimate(read_anatomy(trace, False), device, size, None, None, None)
    anatomy = read_anatomy(trace, True, library_bytes=card.library_bytes)
    if card.usable is None:
        return Estimate(anatomy, card.name, size, None, None, None)
    usable, library = card.usable, card.library_bytes
    does_fit = fits(trace, usable, library)
    largest = None
    if size is not None and samples is not None:

        def try_size(n: int) -> tuple[int, bool]:
            trace = trace_copy(plan, n)
            return read_anatomy(trace, True, library_bytes=library).peak, fits(
                trace, usable, library
            )

        largest = largest_size(try_size, usable, size, anatomy.peak, does_fit)
    return Estimate(anatomy, card.name, size, usable, does_fit, largest)


def _rough(plan: Plan, size: int | None, card: Card | None, reason: str) -> Estimate:
    anatomy = rough_anatomy(plan, size, 0 if card is None else card.library_bytes)
    usable = None if card is None else card.usable
    does_fit = None if usable is None else anatomy.peak <= usable
    name = "cpu" if card is None else card.name
    return Estimate(anatomy, name, size, usable, does_fit, None, reason)
