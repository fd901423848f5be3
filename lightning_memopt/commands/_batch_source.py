"""A batch for an estimate: from shapes, from the user's data, or from the module's own example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt.commands._errors import CommandError
from lightning_memopt.core.batches import count_samples, repeat_samples
from lightning_memopt.core.failure_place import first_line

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_SAMPLES = 4  # shapes alone count, and more can be repeated


class ForwardOnly(nn.Module):
    """A module whose step is forward and backward of the mean of its output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if hasattr(module, "configure_optimizers"):
            self.configure_optimizers = module.configure_optimizers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)


def batch_of_shapes(inputs: list[str]) -> Any:
    """Return a batch of `[name=]SHAPE[:dtype[:high]]`s, the shape of one sample each.

    With names it is a mapping; of several without it is a tuple, of one that tensor.

    Raises:
        CommandError: One isn't of that form, or only some have names.
    """
    made = [_input(text) for text in inputs]
    names = [name for name, _ in made]
    if any(names):
        if not all(names) or len(set(names)) < len(names):
            raise CommandError("`--input` needs a name of its own for each input, or for none.")
        return dict(made)
    return made[0][1] if len(made) == 1 else tuple(tensor for _, tensor in made)


def batch_of_data(data: Any, batch_size: int | None) -> Any:
    """Return the first training batch of a data module, loader or dataset.

    Raises:
        CommandError: It gives none.
    """
    try:
        if hasattr(data, "train_dataloader"):
            data.prepare_data()
            data.setup("fit")
            data = data.train_dataloader()
        elif not isinstance(data, DataLoader) and hasattr(data, "__getitem__"):
            data = DataLoader(data, batch_size=batch_size or 1)
        return next(iter(data))
    except StopIteration:
        raise CommandError("`--data` gives no batch.") from None
    except Exception as error:  # whatever the user's code raises
        raise CommandError(f"`--data` gives no batch: {first_line(error)}") from error


def batch_of_example(module: Any) -> tuple[Any, nn.Module]:
    """Return the example input of a LightningModule, and a module that takes it.

    Raises:
        CommandError: It has none.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        raise CommandError(
            "A batch is needed: its shapes with `--input`, such as `--input 3x224x224`, or data "
            "with `--data`; the module has no `example_input_array`."
        )
    return example, ForwardOnly(module)


def sized_batch(batch: Any, size: int | None, accumulates: bool) -> tuple[Any, int | None]:
    """Return a batch to cut micro-batches from, and the samples of one.

    Args:
        batch: Any batch.
        size: Samples of a micro-batch; by default those of the batch.
        accumulates: Whether a step has several.

    Raises:
        CommandError: The samples can't be told.
    """
    samples = count_samples(batch)
    if samples is None:
        if size is not None or accumulates:
            raise CommandError("The samples of the batch can't be told; leave the sizes out.")
        return batch, None
    size = size or samples
    # Where a step has several micro-batches the batch has to be larger than one.
    wanted = 2 * size if accumulates else min(samples, size)
    return (batch if wanted == samples else repeat_samples(batch, wanted)), size


def _input(text: str) -> tuple[str, Tensor]:
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = "", text
    shape, *options = rest.split(":")
    try:
        sizes = [int(part) for part in shape.split("x")] if shape else []
        dtype = _DTYPES[options[0] if options else "float32"]
        high = int(options[1]) if len(options) > 1 else 2
        if len(options) > 2 or high < 1 or min(sizes, default=1) < 1:
            raise ValueError
    except (ValueError, KeyError):
        raise CommandError(
            f"`--input` must be the shape of a sample such as `3x224x224`, `128:int64:30522` or "
            f"`labels=:int64:10`, got {text!r}."
        ) from None
    if dtype.is_floating_point or dtype.is_complex:
        return name, torch.rand(_SAMPLES, *sizes).to(dtype)
    return name, torch.randint(high, (_SAMPLES, *sizes)).to(dtype)
