"""Which versions of other packages are installed, and whether they are those promised."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from lightning_memopt.core.machine_facts import Package

_SUITE = "lightning-memopt"
_NEEDED = ("torch", "lightning", "torchmetrics", "tensorboard")
_FOR_DEVELOPERS = {"dev", "examples", "test"}
_OPTIONAL = ("matplotlib", "pytorch_memlab", "torchvision", "torchao", "bitsandbytes")


def read_packages() -> tuple[Package, ...]:
    """Return what is installed of what the suite needs or can use, as its metadata promises."""
    try:
        distribution = metadata.distribution(_SUITE)
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        needs_python, requirements = "", []
    else:
        facts: Any = distribution.metadata
        needs_python = facts.get("Requires-Python", "")
        requirements = [Requirement(line) for line in distribution.requires or ()]
    python = Requirement(f"python{needs_python}")
    return (
        _package("python", [python], platform.python_version()),
        _package(_SUITE, requirements),
        *(_package(name, requirements) for name in _NEEDED),
        *(_package(name, requirements, is_optional=True) for name in _OPTIONAL),
    )


def _package(
    name: str,
    requirements: list[Requirement],
    version: str | None = None,
    is_optional: bool = False,
) -> Package:
    found = [each for each in requirements if _plain(each.name) == _plain(name)]
    needs = found[0].specifier if found else None
    version = version or _installed(name)
    # "torch 2.14.1+cpu" and release candidates are what they are built from.
    is_right = version is None or needs is None or needs.contains(Version(version), True)
    extras = [match[1] for each in found if (match := _EXTRA.search(str(each.marker or "")))]
    extras.sort(key=lambda extra: (extra in _FOR_DEVELOPERS, extra))
    return Package(
        name,
        version,
        str(needs or ""),
        extras[0] if extras else None,
        is_optional,
        is_too_old=not is_right,
    )


_EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
