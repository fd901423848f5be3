"""What this machine offers a training run, and what is in its way."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from lightning_memopt.commands._doctor_page import print_page
from lightning_memopt.core.allocator_settings import read_settings
from lightning_memopt.core.environment_advice import findings_on_environment
from lightning_memopt.core.machine import read_machine, version_pair
from lightning_memopt.core.machine_advice import findings_on, suggestions_for, why_no_cuda
from lightning_memopt.core.machine_facts import Machine
from lightning_memopt.core.precision import choose_precision_of

_SIZES = {
    "total",
    "free",
    "own",
    "usable",
    "others",
    "used",
    "available",
    "cgroup_limit",
    "address_space_limit",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of a page"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print what was found on this machine, what to do about it, and which callbacks make sense.

    NVIDIA's GPUs are asked without a CUDA context. Where only PyTorch can tell (ROCm, XPU, a driver
    without its management library) it makes one, of some hundred MiB, until the process ends.

    Args:
        args: The parsed arguments.
        console: Where to print.

    Returns:
        The exit status: 0, whatever was found.
    """
    machine = read_machine()
    settings = read_settings(
        machine.variables, version_pair(machine.torch.version), machine.platform
    )
    findings = [*findings_on(machine, settings), *findings_on_environment(machine)]
    suggestions = suggestions_for(machine, _precisions(machine))
    reason = why_no_cuda(machine)
    if not args.json:
        print_page(console, machine, reason, settings, findings, suggestions)
        return 0
    document = {
        **_plain(machine),
        "why_no_cuda": reason,
        "allocator": _plain(settings),
        "findings": [_plain(finding) for finding in findings],
        "callbacks": [_plain(suggestion) for suggestion in suggestions],
    }
    text = json.dumps(document, indent=2)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _precisions(machine: Machine) -> dict[str, tuple[str, str]]:
    """Return what `AutomaticMixedPrecision` would choose on each device, or on the CPU."""
    known = {
        str(device.torch_name): device.is_bf16
        for device in machine.visible
        if device.is_bf16 is not None
    }
    known = known or ({} if machine.visible else {"cpu": machine.host.is_bf16})
    choices = {
        name: choose_precision_of(torch.device(name).type, bool(is_bf16))
        for name, is_bf16 in known.items()
    }
    return {name: (choice.precision, choice.reason) for name, choice in choices.items()}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, sizes under names that say their unit."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if hasattr(value, "others"):
            fields["others"] = value.others
        return {
            f"{name}_bytes" if name in _SIZES else name: _plain(item)
            for name, item in fields.items()
        }
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
