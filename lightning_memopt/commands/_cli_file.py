"""What a LightningCLI configuration says of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memopt.commands._errors import CommandError
from lightning_memopt.commands._targets import call, load_class

_MODULES = ("lightning.pytorch.callbacks", "lightning_memopt", "torch.optim", "torch.nn")

Factory = Callable[[], Any]


@dataclass
class CliFile:
    """What an estimate takes from a configuration; `None` where it says nothing.

    Attributes:
        model: Makes the module.
        model_arguments: Arguments of a module that is named elsewhere.
        data: Makes the data module.
        data_arguments: Arguments of a data module that is named elsewhere.
        optimizer: Makes the optimizer from parameters.
        trainer: Arguments of the trainer, without its callbacks.
        callbacks: Arguments of the suite's callbacks, by class name.
    """

    model: Factory | None = None
    model_arguments: dict[str, Any] = field(default_factory=dict)
    data: Factory | None = None
    data_arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_cli_file(path: Path) -> CliFile:
    """Read a configuration as LightningCLI writes it, that of `fit` if it is one of subcommands.

    Raises:
        CommandError: It can't be read.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        line = str(error).partition("\n")[0]
        raise CommandError(f"{path} can't be read as YAML: {line}") from error
    if isinstance(content, dict) and isinstance(content.get("fit"), dict):
        content = content["fit"]
    if not isinstance(content, dict):
        raise CommandError(f"{path} must hold a LightningCLI configuration.")
    trainer = dict(_mapping(content, "trainer"))
    found = CliFile(callbacks=dict(_suite_callbacks(trainer.pop("callbacks", None) or [])))
    found.trainer = trainer
    found.model, found.model_arguments = _factory(_mapping(content, "model"))
    found.data, found.data_arguments = _factory(_mapping(content, "data"))
    optimizer = _mapping(content, "optimizer")
    if optimizer:
        found.optimizer = _optimizer(optimizer)
    return found


def _mapping(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise CommandError(f"{key!r} of the configuration must be a mapping, got {value!r}.")
    return value


def _factory(value: dict[str, Any]) -> tuple[Factory | None, dict[str, Any]]:
    """Return what makes an object, or the arguments of one whose class is named elsewhere."""
    if "class_path" not in value:
        return None, {key: _made(item) for key, item in value.items()}
    return lambda: _made(value), {}


def _optimizer(value: dict[str, Any]) -> Callable[[Any], Any]:
    if "class_path" not in value:
        raise CommandError("'optimizer' of the configuration needs a `class_path`.")
    made = load_class(value["class_path"], _MODULES)
    arguments = {key: _made(item) for key, item in (value.get("init_args") or {}).items()}
    return lambda parameters: made(parameters, **arguments)


def _made(value: Any) -> Any:
    """Return a value with every `class_path` in it made."""
    if isinstance(value, list):
        return [_made(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not isinstance(value.get("class_path"), str):
        return {key: _made(item) for key, item in value.items()}
    arguments = {key: _made(item) for key, item in (value.get("init_args") or {}).items()}
    return call(load_class(value["class_path"], _MODULES), arguments, value["class_path"])


def _suite_callbacks(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for value in values if isinstance(values, list) else [values]:
        path = value.get("class_path", "") if isinstance(value, dict) else str(value)
        package, _, name = path.rpartition(".")
        if package.partition(".")[0] in ("", "lightning_memopt"):
            yield name, (value.get("init_args") or {}) if isinstance(value, dict) else {}
