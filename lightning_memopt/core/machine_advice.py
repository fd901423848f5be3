"""What to do about what was found on a machine; nothing is advised without a figure from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memopt.core.allocator_settings import (
    CUDA_NAME,
    EXPANDABLE,
    AllocatorSettings,
    line_with_expandable_segments,
)
from lightning_memopt.core.machine_facts import Device, Machine, Package
from lightning_memopt.core.units import GIB, format_bytes
from lightning_memopt.core.visible_devices import VARIABLE

_SMALL = 24 * GIB
_SHARE_OF_OTHERS = 0.01  # a display, or what a driver keeps, is no neighbour


@dataclass(frozen=True)
class Finding:
    """Something to do.

    Attributes:
        subject: What it is about.
        text: What was found, and what to do.
        line: The line for the shell that does it, `""` where there is none.
    """

    subject: str
    text: str
    line: str = ""


@dataclass(frozen=True)
class Suggestion:
    """A callback that makes sense on this machine.

    Attributes:
        callback: As it is written in Python.
        reason: The fact that speaks for it.
    """

    callback: str
    reason: str


def why_no_cuda(machine: Machine) -> str | None:
    """Return why this process can't use CUDA, as far as it can be told, `None` if it can."""
    torch, driver = machine.torch, machine.driver
    if torch.is_cuda_available:
        return None
    if torch.cuda is None and torch.hip is None:
        return f"torch {torch.version} is built without CUDA"
    variable = machine.variables.get(VARIABLE)
    hides = f'{VARIABLE}="{variable}" hides every GPU'
    if driver.error is not None:
        more = f"; and {hides}" if variable is not None and not variable.strip() else ""
        return f"no NVIDIA driver answers: {driver.error}{more}"
    if machine.devices and {device.hidden_by for device in machine.devices} == {VARIABLE}:
        return hides
    if torch.cuda is not None and driver.cuda is not None:
        built = tuple(int(number) for number in torch.cuda.split(".")[:2])
        # A newer minor version runs on an older driver of the same major version.
        if built[0] > driver.cuda[0]:
            return (
                f"driver {driver.version} is too old: it runs CUDA {_dotted(driver.cuda)}, "
                f"torch {torch.version} needs CUDA {torch.cuda}"
            )
    if not machine.devices:
        return f"driver {driver.version} shows no GPU to this process"
    return torch.error or "torch doesn't say"


def findings_on(machine: Machine, settings: AllocatorSettings) -> list[Finding]:
    """Return what to do, the most pressing first.

    Args:
        machine: What was found.
        settings: The allocator's settings.
    """
    return [
        *(Finding("allocator", fault) for fault in settings.faults),
        *_on_packages(machine.packages),
        *_on_devices(machine),
        *_on_fragmentation(machine, settings),
    ]


def _on_packages(packages: tuple[Package, ...]) -> Iterator[Finding]:
    for package in packages:
        requirement = f"{package.name}{package.needs}"
        if package.is_too_old:
            text = (
                f"{package.name} {package.version} is installed, {requirement} is promised to work"
            )
            line = "" if package.name == "python" else f'pip install "{requirement}"'
            yield Finding("versions", text, line)
        elif package.version is None and not package.is_optional and package.needs:
            text = f"{package.name} is not installed, but needed"
            yield Finding("versions", text, f'pip install "{requirement}"')


def _on_devices(machine: Machine) -> Iterator[Finding]:
    names = {device.name for device in machine.devices if device.mig_card is None}
    chosen = machine.variables.get(VARIABLE, "")
    is_by_number = any(entry.strip().isdecimal() for entry in chosen.split(","))
    order = machine.variables.get("CUDA_DEVICE_ORDER")
    if len(names) > 1 and is_by_number and order != "PCI_BUS_ID":
        text = (
            f"CUDA counts the fastest GPU first, the driver by slot: {VARIABLE}={chosen} may be "
            "other GPUs than listed"
        )
        yield Finding("devices", text, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    for device in machine.visible:
        if device.usable is not None and device.total and device.usable == 0:
            yield Finding("devices", f"nothing of {device.torch_name} is left to this process")


def _on_fragmentation(machine: Machine, settings: AllocatorSettings) -> Iterator[Finding]:
    is_set = settings.values.get(EXPANDABLE) == "True"
    is_native = settings.values.get("backend", "native") == "native"
    if machine.has_cuda and machine.platform == "linux" and is_native and not is_set:
        text = (
            f"segments of {machine.visible[0].torch_name} can't grow: where batch shapes vary, or "
            "`memory/fragmentation` is high, let them, before Python starts"
            if machine.visible
            else f"`{EXPANDABLE}` is off: where batch shapes vary, set it before Python starts"
        )
        yield Finding(CUDA_NAME, text, line_with_expandable_segments(settings))


def suggestions_for(machine: Machine, precisions: dict[str, tuple[str, str]]) -> list[Suggestion]:
    """Return the callbacks that make sense here, each with its reason.

    Args:
        machine: What was found.
        precisions: For torch's name of a device the precision that would be chosen there, and why.
    """
    return list(_suggestions(machine, precisions))


def _suggestions(machine: Machine, precisions: dict[str, tuple[str, str]]) -> Iterator[Suggestion]:
    where, usable = _place(machine)
    reason = f"{where} has {format_bytes(usable)} for this process: if it runs out, it says why"
    yield Suggestion("OOMReport()", reason)
    chosen = {words for words in precisions.values() if words[0] != "32-true"}
    if chosen:
        precision, why = sorted(chosen)[-1]
        yield Suggestion("AutomaticMixedPrecision()", f"{precision}: {why}")
    crowded = [device for device in machine.visible if _is_crowded(device)]
    if usable < _SMALL or crowded:
        reason = f"{format_bytes(usable)} of {where} are left: it finds the micro-batch that fits"
        yield Suggestion('AutoAccumulation(memory="90%")', reason)
    if usable < _SMALL:
        reason = f"keeps fewer activations in the {format_bytes(usable)} of {where}"
        yield Suggestion("GradientCheckpointing()", reason)
    if crowded:
        device = max(crowded, key=lambda each: each.others or 0)
        reason = (
            f"{_holders(device)} {format_bytes(device.others or 0)} of {device.torch_name}: "
            "it leaves them what is only cached"
        )
        yield Suggestion("EmptyCache()", reason)
    versions = {package.name: package.version for package in machine.packages}
    if versions.get("matplotlib"):
        reason = f"matplotlib {versions['matplotlib']} draws its pictures"
        if versions.get("pytorch_memlab") and machine.has_cuda:
            reason += f", pytorch_memlab {versions['pytorch_memlab']} weighs lines"
        yield Suggestion("MemoryProfiler()", reason)


def _place(machine: Machine) -> tuple[str, int]:
    """Return the device with least for this process, or the CPU, and how much that is."""
    known = [(each.usable, str(each.torch_name)) for each in machine.visible if each.usable]
    usable, name = min(known, default=(machine.host.usable, "cpu"))
    return name, usable


def _is_crowded(device: Device) -> bool:
    return (device.others or 0) > _SHARE_OF_OTHERS * (device.total or 0)


def _holders(device: Device) -> str:
    if not device.processes:
        return "others hold"
    first, *more = device.processes
    rest = f" and {len(more)} more hold" if more else " holds"
    return f"{first.name} ({first.pid}){rest}"


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
