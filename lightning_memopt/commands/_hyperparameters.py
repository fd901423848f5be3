"""The hyper-parameters that Lightning saves beside a run, as flat keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FILE = "hparams.yaml"


class HyperparametersError(Exception):
    """The file isn't YAML."""


def read_hyperparameters(directory: Path) -> dict[str, Any]:
    """Return a run's hyper-parameters by dotted key; empty without a file.

    Raises:
        HyperparametersError: The file can't be read.
    """
    import yaml

    path = directory / _FILE
    if not path.is_file():
        return {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_tolerant_loader())
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise HyperparametersError(f"{path} can't be read as YAML; it is left out") from error
    return dict(_flat(content, "", ())) if isinstance(content, dict) else {}


def differing(first: dict[str, Any], second: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys whose values differ, each with what the `first` and the `second` have."""
    found: dict[str, dict[str, Any]] = {}
    for key in first | second:
        sides = {"first": first, "second": second}
        values = {side: known[key] for side, known in sides.items() if key in known}
        # Not a number is the same as itself here.
        if len(values) < 2 or (first[key] != second[key] and repr(first[key]) != repr(second[key])):
            found[key] = values
    return found


def _flat(value: Any, key: str, above: tuple[int, ...]) -> list[tuple[str, Any]]:
    if id(value) in above:  # YAML can hold itself
        return [(key, "...")]
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        items = list(enumerate(value))
    else:
        return [(key, value if isinstance(value, bool | int | float | None) else str(value))]
    above = (*above, id(value))
    return [
        pair
        for name, each in items
        for pair in _flat(each, f"{key}.{name}" if key else str(name), above)
    ]


def _tolerant_loader() -> Any:
    """Return a safe loader that shows objects of Python as what they hold, and makes none."""
    import yaml

    def construct(loader: Any, tag: str, node: Any) -> Any:
        name = tag.rpartition(":")[2].removeprefix("python/")
        if isinstance(node, yaml.ScalarNode):
            return loader.construct_scalar(node) or name
        if isinstance(node, yaml.SequenceNode):
            items = loader.construct_sequence(node, deep=True)
            return items if name == "tuple" else {name: items}
        return {"class": name} | loader.construct_mapping(node, deep=True)

    loader: Any = type("TolerantLoader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("", construct)
    return loader
