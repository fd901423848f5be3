"""Classes, functions and objects that are named on the command line, and what they make."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_memopt.commands._errors import CommandError
from lightning_memopt.core.failure_place import first_line


def load_target(text: str) -> Any:
    """Return what `package.module:name` or `path/file.py:name` names.

    The working directory can be imported from, as with `python -m`.

    Raises:
        CommandError: The module can't be imported, or has no such name.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise CommandError(f"{text!r} must be `package.module:Name` or `path/file.py:Name`.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import(where)
    except Exception as error:  # whatever the user's code does when imported
        raise CommandError(f"{where!r} can't be imported: {first_line(error)}") from error
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise CommandError(f"{where!r} has no {name!r}.") from error


def load_class(path: str, bases: Iterable[str]) -> Any:
    """Return a class by its dotted path, or by its name alone from one of a few modules.

    Raises:
        CommandError: There is none.
    """
    where, _, name = path.rpartition(".")
    if where:
        return load_target(f"{where}:{name}")
    for base in bases:
        found = getattr(importlib.import_module(base), name, None)
        if found is not None:
            return found
    raise CommandError(f"{path!r} must be a dotted path such as `package.module.Name`.")


def call(target: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Any:
    """Call a class or function of the user's.

    Raises:
        CommandError: It raises.
    """
    try:
        return target(**arguments)
    except Exception as error:  # whatever the user's code raises
        raise CommandError(f"{name} can't be made: {first_line(error)}") from error


def read_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Return the arguments in `key=value`s; values are JSON, Python literals or plain text.

    Raises:
        CommandError: One has no `=`.
    """
    arguments = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise CommandError(f"{text!r} must be `name=value`.")
        arguments[key] = _value(value)
    return arguments


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _import(name: str) -> ModuleType:
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file as Python runs a script: beside its neighbours."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
