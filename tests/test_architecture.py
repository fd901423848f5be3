"""The rules of the architecture, read from the sources with `ast`; each check is shown to fail."""

from __future__ import annotations

import ast
import doctest
import enum
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import lightning_memopt

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_memopt"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")
}

PUBLIC = {
    "AutoAccumulation",
    "AutomaticMixedPrecision",
    "EmptyCache",
    "GradientAccumulation",
    "GradientCheckpointing",
    "MemoryGrowthWarning",
    "MemoryMonitor",
    "MemoryProfiler",
    "OOMReport",
    "anatomy",
    "checkpoint_layers",
    "estimate",
    "is_out_of_memory",
    "is_recomputing",
    "read_memory",
    "select_layers",
    "split_batch",
}
CORE = "lightning_memopt.core"
CALLBACKS = "lightning_memopt.callbacks"
COMMANDS = "lightning_memopt.commands"  # on top of all: they may import core, callbacks, lightning
LEAVES = {f"{CORE}.units", f"{CORE}.checks"}
PLANNING = {
    f"{CORE}.{name}"
    for name in (
        "accumulation",
        "allocator_settings",
        "cache_policy",
        "caching_allocator",
        "cards",
        "environment_advice",
        "growth",
        "largest_size",
        "machine_advice",
        "machine_facts",
        "micro_batch_search",
        "oom_diagnosis",
        "planner",
        "recompute_candidates",
        "recompute_choice",
        "recompute_prices",
        "recompute_search",
        "step_profile",
        "visible_devices",
    )
}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
COMPOSERS = {f"{CALLBACKS}.memory_optimizer"}
PRIVATE = {f"{CALLBACKS}._lightning{part}" for part in ("", "_logs", "_step")}
MAX_LINES = 250
MAX_ARGUMENTS = 6
MAX_SUMMARY = 100


def imports(source: str, module: str) -> set[str]:
    """Return what a module imports, by dotted name, names inside a package included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def is_or_is_inside(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def wrong_imports(source: str, module: str) -> list[str]:
    """Return the imports that break the direction of the layers."""
    names = imports(source, module)
    if module in LEAVES | PLANNING:
        allowed = sys.stdlib_module_names | {"__future__"}
        peers = LEAVES | PLANNING if module in PLANNING else set()
        packages = {CORE, "lightning_memopt"}
        return sorted(
            name
            for name in names
            if name.split(".")[0] not in allowed
            and not is_or_is_inside(name, peers)
            and not (peers and name in packages)
        )
    if module.startswith(f"{CORE}."):
        above = LIGHTNING | {CALLBACKS, COMMANDS}
        return sorted(name for name in names if is_or_is_inside(name, above))
    if module.startswith(f"{CALLBACKS}."):
        # A name with an underscore is a part of callbacks, not one.
        others = {other for other in MODULES if other.startswith(f"{CALLBACKS}.")} - {module}
        others = {other for other in others if not other.startswith(f"{CALLBACKS}._")}
        wrong = {n for n in names if n == "lightning_memopt" or is_or_is_inside(n, {COMMANDS})}
        if module not in COMPOSERS:
            wrong |= {name for name in names if is_or_is_inside(name, others)}
        return sorted(wrong)
    return []


def private_accesses(source: str) -> list[str]:
    """Return accesses to a private attribute of anything but `self` and `cls`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"getattr", "setattr", "hasattr", "delattr"}
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            owner, name = node.args[0], str(node.args[1].value)
        else:
            continue
        is_own = isinstance(owner, ast.Name) and owner.id in {"self", "cls"}
        if name.startswith("_") and not name.startswith("__") and not is_own:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def door_statements(source: str) -> list[str]:
    """Return the statements that a door must not hold."""
    docstring, *statements = ast.parse(source).body
    wrong = [] if isinstance(docstring, ast.Expr) else [docstring]
    for statement in statements:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        is_name = isinstance(statement, ast.Assign) and all(
            ast.unparse(target) in {"__all__", "__version__"} for target in statement.targets
        )
        if not (is_import or is_name):
            wrong.append(statement)
    return [ast.unparse(statement) for statement in wrong]


def faults_of_docstring(thing: object) -> list[str]:
    """Return what a public class or function lacks in its docstring or signature."""
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if not own:
        return ["no docstring"]
    doc = inspect.cleandoc(own)
    faults = []
    summary = doc.splitlines()[0]
    if len(summary) >= MAX_SUMMARY or not summary.endswith("."):
        faults.append(f"summary is no sentence under {MAX_SUMMARY} characters: {summary}")
    documented = set(re.findall(r"^    (\w+):", section(doc, "Args"), re.MULTILINE))
    signature = inspect.signature(thing)  # type: ignore[arg-type]
    faults += [
        f"`{name}` is not in Args" for name in signature.parameters if name not in documented
    ]
    faults += [f"Args has `{n}`, no parameter" for n in documented - set(signature.parameters)]
    if ">>>" not in section(doc, "Example"):
        faults.append("no Example that runs")
    return faults


def section(doc: str, name: str) -> str:
    match = re.search(rf"^{name}:\n((?:[ ]{{4}}.*\n?|\n)*)", doc, re.MULTILINE)
    return match[1] if match else ""


def faults_of_constructor(cls: type) -> list[str]:
    """Return what keeps a constructor from being a short list of plain named values."""
    parameters = inspect.signature(cls).parameters.values()
    faults = []
    if len(parameters) > MAX_ARGUMENTS:
        faults.append(f"{len(parameters)} arguments")
    for parameter in parameters:
        if parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
            faults.append(f"`{parameter}` takes anything")
        if isinstance(parameter.default, enum.Enum):
            faults.append(f"`{parameter}` is an Enum")
    return faults


def public(kind: type | None = None) -> list[str]:
    names = sorted(lightning_memopt.__all__)
    return [n for n in names if kind is None or isinstance(getattr(lightning_memopt, n), kind)]


# The package keeps the rules


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str) -> None:
    assert wrong_imports(MODULES[module].read_text(), module) == []


@pytest.mark.parametrize(
    "name", ["accumulation", "cache_policy", "growth", "machine_advice", "units", "checks"]
)
def test_the_files_that_plan_exist_under_the_name_that_is_checked(name: str) -> None:
    assert f"{CORE}.{name}" in MODULES


@pytest.mark.parametrize(
    "module",
    sorted(m for m in MODULES if m.startswith(CALLBACKS) and m not in PRIVATE),
)
def test_private_attributes_are_touched_in_few_files(module: str) -> None:
    assert private_accesses(MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_file_is_short_and_has_a_name_of_its_own(module: str) -> None:
    assert MODULES[module].stem not in {"utils", "common", "config", "helpers", "misc"}
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_enum_is_defined(module: str) -> None:
    assert "enum" not in {n.split(".")[0] for n in imports(MODULES[module].read_text(), module)}


def test_the_door_holds_names_only() -> None:
    assert door_statements(MODULES["lightning_memopt.__init__"].read_text()) == []


def test_exactly_the_agreed_names_are_public() -> None:
    assert set(lightning_memopt.__all__) == PUBLIC
    assert len(lightning_memopt.__all__) == len(PUBLIC)
    tree = ast.parse(MODULES["lightning_memopt.__init__"].read_text())
    imported = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == PUBLIC


@pytest.mark.parametrize("name", public())
def test_public_names_are_documented(name: str) -> None:
    assert faults_of_docstring(getattr(lightning_memopt, name)) == []


@pytest.mark.parametrize("name", public(type))
def test_constructors_take_few_plain_arguments(name: str) -> None:
    assert faults_of_constructor(getattr(lightning_memopt, name)) == []


@pytest.mark.parametrize("module", sorted(m for m in MODULES if not m.endswith("__init__")))
def test_examples_in_docstrings_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert results.failed == 0


# Each check can fail


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        (f"{CORE}.memory", "import lightning", ["lightning"]),
        (f"{CORE}.memory", "def f():\n    import pytorch_lightning", ["pytorch_lightning"]),
        (f"{CORE}.memory", "import_module('lightning.fabric')", ["lightning.fabric"]),
        (f"{CORE}.memory", "from ..callbacks import _base", [CALLBACKS, f"{CALLBACKS}._base"]),
        (f"{CORE}.memory", f"import {COMMANDS}.report", [f"{COMMANDS}.report"]),
        (f"{CORE}.units", "import torch", ["torch"]),
        (f"{CORE}.units", f"from {CORE}.checks import f", [f"{CORE}.checks", f"{CORE}.checks.f"]),
        (f"{CORE}.cache_policy", "import torch.nn", ["torch.nn"]),
        (f"{CORE}.cache_policy", f"from {CORE} import memory", [f"{CORE}.memory"]),
        (
            f"{CALLBACKS}.new",
            f"from {CALLBACKS}.memory_monitor import A",
            [f"{CALLBACKS}.memory_monitor", f"{CALLBACKS}.memory_monitor.A"],
        ),
        (f"{CALLBACKS}.new", "from . import memory_monitor", [f"{CALLBACKS}.memory_monitor"]),
        (f"{CALLBACKS}._new", "from . import memory_monitor", [f"{CALLBACKS}.memory_monitor"]),
        (f"{CALLBACKS}.new", "from lightning_memopt import A", ["lightning_memopt"]),
        (f"{CALLBACKS}.new", "from ..commands import a", [COMMANDS, f"{COMMANDS}.a"]),
        (f"{CALLBACKS}.memory_optimizer", f"import {COMMANDS}.a", [f"{COMMANDS}.a"]),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, found: list[str]) -> None:
    assert wrong_imports(source, module) == found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (f"{CORE}.memory", "import torch\nfrom lightning_memopt.core.units import GIB"),
        (f"{CORE}.units", "import re\nfrom dataclasses import dataclass"),
        (f"{CORE}.cache_policy", f"from {CORE}.units import GIB\nfrom . import checks"),
        (f"{CALLBACKS}.new", "import lightning.pytorch as pl\nfrom ._lightning import f"),
        (f"{CALLBACKS}.new", f"from {CALLBACKS}._base import A\nfrom {CORE}.memory import f"),
        (f"{CALLBACKS}.memory_optimizer", f"from {CALLBACKS}.memory_monitor import A"),
        (f"{COMMANDS}.new", f"import lightning\nfrom {CALLBACKS}.memory_monitor import A"),
        (f"{COMMANDS}.new", f"from {CORE}.memory import f\nfrom lightning_memopt import A"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert wrong_imports(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "trainer._loop",
        "trainer.strategy._x = 1",
        "self.trainer._loop",
        "getattr(trainer, '_loop')",
        "setattr(trainer.fit_loop, '_loop', 1)",
        "type(self)._loop",
        "pl._private.f()",
    ],
)
def test_a_private_attribute_of_another_object_is_found(source: str) -> None:
    assert len(private_accesses(source)) == 1


@pytest.mark.parametrize(
    "source", ["self._x", "cls._x", "trainer.x", "x.__class__", "getattr(trainer, 'x')", "_f(x)"]
)
def test_an_own_or_public_attribute_passes(source: str) -> None:
    assert private_accesses(source) == []


@pytest.mark.parametrize("source", ["def f(): ...", "x = 1", "if 1:\n    import a", "class A: ..."])
def test_a_definition_in_the_door_is_found(source: str) -> None:
    assert door_statements(f'"""Doc."""\nimport a\n__version__ = "1"\n{source}') != []


def test_a_door_without_a_docstring_is_found() -> None:
    assert door_statements("import a") == ["import a"]


class Documented:
    """Do one thing.

    Args:
        size: Bytes; more is
            more: always.

    Example:
        >>> 1 + 1
        2
    """

    def __init__(self, size: int) -> None:
        self.size = size


class Undocumented:
    def __init__(self, size: int) -> None:
        self.size = size


class WithoutArgs:
    """Do one thing

    Args:
        amount: Of another name.
    """

    def __init__(self, size: int) -> None:
        self.size = size


class Word(enum.Enum):
    A = 1


class Anything:
    def __init__(self, a=1, b=2, c=3, d=4, e=5, f=Word.A, **kwargs):  # type: ignore[no-untyped-def]
        pass


def test_a_missing_part_of_a_docstring_is_found() -> None:
    assert faults_of_docstring(Documented) == []
    assert faults_of_docstring(Undocumented) == ["no docstring"]
    assert faults_of_docstring(WithoutArgs) == [
        "summary is no sentence under 100 characters: Do one thing",
        "`size` is not in Args",
        "Args has `amount`, no parameter",
        "no Example that runs",
    ]


def test_a_constructor_that_takes_anything_is_found() -> None:
    assert faults_of_constructor(Documented) == []
    assert faults_of_constructor(Anything) == [
        "7 arguments",
        "`f=<Word.A: 1>` is an Enum",
        "`**kwargs` takes anything",
    ]
