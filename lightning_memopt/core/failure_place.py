"""Where in the code an exception was raised: the user's own line, the module, the phase."""

from __future__ import annotations

import functools
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

MOVING = "moving the batch to the device"
# Methods of the model that are run by its Trainer, and functions of PyTorch's and Lightning's, that
# say by their name what is going on. The innermost counts: Lightning runs forward and backward
# within the optimizer's step.
_STEPS = {
    "training_step": "forward",
    "validation_step": "validation",
    "test_step": "test",
    "predict_step": "predict",
}
_PHASES = {
    "backward": "backward",
    "transfer_batch_to_device": MOVING,
    "model_to_device": "moving the model to the device",
    "configure_model": "building the model",
    "load_state_dict": "loading a checkpoint",
}
_OPTIMIZER_STEP = "optimizer step"
_PLUMBING = {
    "python",
    "torch",
    "lightning",
    "lightning_fabric",
    "lightning_memopt",
    "lightning_utilities",
    "pytorch_lightning",
    "torchmetrics",
}
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Line:
    """A line of source code.

    Attributes:
        file: Path of its file.
        number: Its number, from 1.
        function: Name of the function that it is in.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        place = f"{_short(self.file)}:{self.number} in {self.function}"
        return f"{place}: {code}" if code else place

    @property
    def is_own(self) -> bool:
        """Whether it is the user's: neither Python's nor an installed package's."""
        return _package_of(self.file) == ""

    @property
    def is_plumbing(self) -> bool:
        """Whether it belongs to Python, PyTorch, Lightning or this suite."""
        return _package_of(self.file) in _PLUMBING


@dataclass(frozen=True)
class FailurePlace:
    """Where an exception was raised.

    Attributes:
        phase: What was going on ("forward", "backward", "optimizer step", "validation", ...), or
            `None`.
        own: The user's own line, the innermost.
        line: The innermost line that is neither PyTorch's nor Lightning's (the user's, or one of a
            library of models), or the innermost of all where there is no such line.
        module: Name of the innermost module whose forward was running.
    """

    phase: str | None
    own: Line | None
    line: Line | None
    module: str | None


def failure_place(exception: BaseException, model: nn.Module) -> FailurePlace:
    """Return where an exception, or the one that it was raised from, was raised.

    Args:
        exception: An exception with its traceback.
        model: Modules are named as parts of it.
    """
    phase = module = None
    names = {id(part): name for name, part in model.named_modules()}
    step = ""
    for frame, _ in _lines_of(exception):
        function = frame.f_code.co_name
        if function in _STEPS and not step and _local(frame, "self") is model:
            step = function  # that it calls another is its own business
            phase = _STEPS[function]
        elif function in _PHASES and (
            _package_of(frame.f_code.co_filename) in _PLUMBING or _local(frame, "self") is model
        ):
            phase = _PHASES[function]
        elif function == "step" and _is_a(_local(frame, "self"), Optimizer):
            phase = _OPTIMIZER_STEP
        elif function == "forward" and _is_a(owner := _local(frame, "self"), nn.Module):
            module = names.get(id(owner), module)
    lines = [
        Line(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in _lines_of(exception)
    ]
    own, innermost = own_and_innermost(reversed(lines))
    return FailurePlace(phase, own, innermost or next(reversed(lines), None), module or None)


def own_and_innermost(lines: Iterable[Line]) -> tuple[Line | None, Line | None]:
    """Return the user's own line and the first that isn't plumbing, of a stack, innermost first."""
    innermost = None
    for line in lines:
        if innermost is None and not line.is_plumbing:
            innermost = line
        if line.is_own:
            return line, innermost
    return None, innermost


@functools.cache
def _package_of(file: str) -> str:
    """Return the package that a file belongs to, `""` for the user's own."""
    parts = Path(file).parts
    for position, part in enumerate(parts[:-1]):
        if part in _INSTALLED:
            return parts[position + 1]
    if file.startswith(_ROOTS):
        return "torch"
    # What isn't a file was generated, but for what was typed in.
    is_generated = file.startswith("<") and file != "<stdin>"
    return "python" if is_generated or file.startswith(_LIBRARIES) else ""


def _short(file: str) -> str:
    """Return a path as people read it: within the working directory, or within its package."""
    path = Path(file)
    for position, part in enumerate(path.parts[:-1]):
        if part in _INSTALLED:
            return str(Path(*path.parts[position + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _lines_of(exception: BaseException) -> Iterator[tuple[FrameType, int]]:
    error: BaseException | None = exception
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from traceback.walk_tb(error.__traceback__)
        error = error.__cause__


def first_line(error: Exception) -> str:
    """Return kind and first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def local_variable(exception: BaseException, name: str, is_it: Callable[[Any], bool]) -> Any:
    """Return the innermost local variable of a name where an exception was raised, or `None`.

    Args:
        exception: An exception with its traceback.
        name: The variable's name.
        is_it: Whether a value is what is looked for.
    """
    for frame, _ in reversed(list(_lines_of(exception))):
        if is_it(value := _local(frame, name)):
            return value
    return None


def _is_a(thing: object, kind: type) -> bool:
    # `isinstance` would ask for its `__class__`, which may do anything.
    return issubclass(type(thing), kind)


def _local(frame: FrameType, name: str) -> Any:
    """Return a local variable, `None` where the function has none of that name itself.

    Python before 3.13 leaves a copy of all of a frame's variables on the frame: one that has the
    exception among them would keep it alive, and all that its traceback holds. So only frames that
    are known to have what is wanted are asked.
    """
    return frame.f_locals.get(name) if name in frame.f_code.co_varnames else None
