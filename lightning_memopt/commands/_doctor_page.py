"""How the findings about a machine are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_memopt.core.allocator_settings import AllocatorSettings
from lightning_memopt.core.machine_advice import Finding, Suggestion
from lightning_memopt.core.machine_facts import Device, Host, Machine, Package
from lightning_memopt.core.units import format_bytes

Rows = Iterator[tuple[str, str]]


def print_page(
    console: Console,
    machine: Machine,
    reason: str | None,
    settings: AllocatorSettings,
    findings: Sequence[Finding],
    suggestions: Sequence[Suggestion],
) -> None:
    """Print all that was found, what to do about it, and which callbacks make sense."""
    _section(console, "Devices", _devices(machine, reason))
    _section(console, "CPU", _host(machine.host))
    _section(console, "Allocator and environment", _environment(machine, settings))
    _section(console, "Versions", _versions(machine.packages))
    callbacks = ((each.callback, each.reason) for each in suggestions)
    _section(console, "Callbacks for this machine", callbacks)
    console.print(Text("To do" if findings else "Nothing to do", style="bold"))
    for finding in findings:
        console.print(Padding(Text(f"{finding.subject}: {finding.text}"), (0, 0, 0, 2)))
        if finding.line:
            # Never broken: it is to be copied.
            console.print(Text(f"    {finding.line}", style="cyan"), soft_wrap=True)


def _section(console: Console, title: str, rows: Rows) -> None:
    console.print(Text(title, style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, what in rows:
        table.add_row(Text(name), Text(what))
    console.print(Padding(table, (0, 0, 1, 2)))


def _devices(machine: Machine, reason: str | None) -> Rows:
    for device in machine.devices:
        yield device.torch_name or "hidden", _described(device)
        if device.torch_name is None:
            continue
        yield "", ", ".join(_memory(device))
        for process in device.processes:
            yield "", f"{process.name} ({process.pid}) holds {format_bytes(process.used)}"
    if reason is not None:
        yield "no CUDA", reason
    driver = machine.driver
    if driver.error is None:
        runs = f", runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        yield "driver", f"{driver.version}{runs}"
    elif machine.torch.is_cuda_available:
        yield "driver", f"doesn't answer ({driver.error}): figures are PyTorch's"
    built = f"ROCm {machine.torch.hip}" if machine.torch.hip else f"CUDA {machine.torch.cuda}"
    is_cpu = machine.torch.hip is None and machine.torch.cuda is None
    yield "torch", f"{machine.torch.version}, {'for the CPU' if is_cpu else built}"


def _described(device: Device) -> str:
    parts = [device.name]
    if device.capability is not None:
        parts.append(f"compute capability {device.capability[0]}.{device.capability[1]}")
    if device.mig_card is not None:
        parts.append(f"MIG instance of {device.mig_card}")
    elif device.is_mig_on is not None:
        parts.append("MIG on" if device.is_mig_on else "MIG off")
    if device.torch_name is None:
        parts += [device.uuid] if device.uuid else []
        parts.append(f"hidden: {device.hidden_by}")
    elif device.is_bf16 is not None:
        parts.append("bf16" if device.is_bf16 else "no bf16")
    return ", ".join(parts)


def _memory(device: Device) -> Iterator[str]:
    yield "total unknown" if device.total is None else f"{format_bytes(device.total)} in total"
    if device.others is not None:
        yield f"{format_bytes(device.others)} used by others"
    if device.usable is not None:
        yield f"{format_bytes(device.usable)} usable by this process"


def _host(host: Host) -> Rows:
    yield "memory", f"{format_bytes(host.total)} in total, {format_bytes(host.available)} available"
    limits = {"control group": host.cgroup_limit, "RLIMIT_AS": host.address_space_limit}
    for name, limit in limits.items():
        if limit is not None:
            yield name, f"at most {format_bytes(limit)}"
    yield "usable", f"{format_bytes(host.usable)} by this process"
    quota = "" if host.quota is None else f", for the time of {host.quota:g}"
    yield "cores", f"{host.usable_cores} of {host.cores} for this process{quota}"
    yield "bf16", "yes" if host.is_bf16 else "no: neither AVX512-BF16 nor AMX"


def _environment(machine: Machine, settings: AllocatorSettings) -> Rows:
    for name, value in machine.variables.items():
        is_read = name == settings.variable
        yield name, f'"{value}"' + (" (read by this PyTorch)" if is_read else "")
    if settings.variable is None:
        yield "allocator", "no settings: PyTorch's defaults"


def _versions(packages: Sequence[Package]) -> Rows:
    for package in packages:
        notes = [f"needs {package.needs}"] if package.needs else []
        if package.version is None and package.extra is not None:
            notes.append(f'pip install "lightning-memopt[{package.extra}]"')
        note = f" ({', '.join(notes)})" if notes else ""
        yield package.name, (package.version or "not installed") + note
