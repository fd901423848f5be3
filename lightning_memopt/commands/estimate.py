"""What training a module on a GPU will need, without the GPU and before anything runs."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_memopt.commands._planned_training import PlannedTraining
from lightning_memopt.core.anatomy_tables import advice_table, anatomy_tables
from lightning_memopt.core.estimate import STRATEGIES, Estimate
from lightning_memopt.core.model_advice import Advice
from lightning_memopt.core.training_step import PRECISIONS
from lightning_memopt.core.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    add = parser.add_argument
    add("module", nargs="?", help="`package.module:Name` or `file.py:Name` of a module, a function "
        "that makes one, or an object")  # fmt: skip
    add("--init", action="append", default=[], metavar="NAME=VALUE", help="an argument of it")
    add("--config", type=Path, metavar="YAML", help="a LightningCLI configuration; options win")
    add("--input", action="append", default=[], metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
        help="one sample of an input: `3x224x224`, `128:int64:30522`, `labels=:int64:10`; "
        "again for each input")  # fmt: skip
    add("--data", metavar="TARGET", help="a data module, loader or dataset, named as the module")
    add("--data-init", action="append", default=[], metavar="NAME=VALUE", help="an argument of it")
    add("--batch-size", type=_positive, metavar="N", help="samples of a micro-batch")
    add("--accumulate-grad-batches", type=_positive, metavar="K", help="micro-batches of a step")
    add("--precision", help=f"one of {', '.join(PRECISIONS)}; 32-true by default")
    add("--optimizer", metavar="NAME", help="of `torch.optim`; the module's own by default")
    add("--strategy", choices=STRATEGIES, help="auto for one device, ddp for a rank of several")
    add("--device", default="cuda", help="a card such as `h200`, a size such as `24GiB`, or `cpu`")
    add("--checkpoint", action="append", metavar="LAYERS",
        help="layers to checkpoint: `auto`, names or class names")  # fmt: skip
    add("--advice", action=argparse.BooleanOptionalAction, default=True,
        help="also trace what would save most, which takes several times as long")  # fmt: skip
    add("--json", action="store_true", help="print one JSON document instead of a page")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the peak that training will have and its parts, and the largest micro-batch that fits.

    Args:
        args: The parsed arguments.
        console: Where to print.

    Returns:
        The exit status: 0, also for a step that doesn't fit.
    """
    progress = Console(stderr=True)
    # What the user's code prints must not get among the JSON.
    with progress.status("Tracing a training step ..."), redirect_stdout(sys.stderr):
        training = PlannedTraining(args)
        found = training.estimate()
    advice: list[Advice] = []
    if args.advice and not found.reason:
        with progress.status("Tracing what would save memory ..."), redirect_stdout(sys.stderr):
            advice = training.advice()
    if args.json:
        document = {**training.as_dict(), **found.as_dict()}
        document["advice"] = [each.as_dict() for each in advice]
        console.print(json.dumps(document, indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    _print_page(console, training, found)
    if advice:
        console.print(advice_table(advice, found.anatomy.peak))
    return 0


def _print_page(console: Console, training: PlannedTraining, found: Estimate) -> None:
    console.print(Text(training.title(), style="bold"))
    for note in training.notes:
        console.print(Text(f"Note: {note}."))
    if found.reason:
        line = f"A rough figure: the step can't be traced, as {found.reason}"
        console.print(Text(line, style="yellow"))
    console.print(anatomy_tables(found.anatomy))
    console.print(_verdict(found))


def _verdict(found: Estimate) -> Text:
    if found.fits is None or found.usable is None:
        return Text("Whether it fits is told for a card or a size: `--device h200`, `24GiB`.")
    usable = f"{format_bytes(found.usable)} of {found.device}"
    if found.largest is None:
        largest = ""
    elif found.largest:
        largest = f"; the largest micro-batch that fits has {found.largest} samples"
    else:
        largest = "; not even one sample fits"
    if found.fits:
        return Text(f"Fits the {usable}{largest}.", style="green")
    return Text(f"Doesn't fit the {usable}{largest}.", style="red")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
