"""What of the user's holds tensors: attributes of the model, callbacks and data, and globals."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import Optimizer

from lightning_memopt.callbacks._base import callbacks_of
from lightning_memopt.core.object_parts import attributes_of, is_foreign
from lightning_memopt.core.tensor_holders import Holding, find_holders

_SKIPPED = (pl.Trainer, Strategy, Optimizer)


def holders_of(trainer: pl.Trainer) -> dict[str, Holding]:
    """Look through all that is the user's."""
    model = trainer.lightning_module
    parts: list[Any] = [*callbacks_of(trainer), *trainer.loggers]
    datamodule = getattr(trainer, "datamodule", None)
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    # Not by `getattr`: a property may do anything.
    datasets = [attributes_of(loader).get("dataset") for loader in loaders]
    named = [("model", model), *((type(part).__name__, part) for part in parts)]
    named += [("datamodule", datamodule), *(("dataset", dataset) for dataset in datasets)]
    roots: dict[str, object] = {}
    for name, root in named:
        same = sum(other.partition("[")[0] == name for other in roots)
        roots[f"{name}[{same}]" if same else name] = root
    modules = _modules_of([*model.modules(), *parts, datamodule, *datasets])
    return find_holders(roots, modules, _SKIPPED)


def _modules_of(things: list[Any]) -> list[ModuleType]:
    """Return the Python modules in which the classes of some objects are, and the script."""
    names = {base.__module__ for thing in things for base in type(thing).__mro__} | {"__main__"}
    own = (name for name in sorted(names) if not is_foreign(name))
    return [sys.modules[name] for name in own if name in sys.modules]
