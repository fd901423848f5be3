"""Choosing a precision for a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["bf16-mixed", "16-mixed", "32-true"]
BF16_CAPABILITY = (8, 0)
PRECISIONS = ("auto", "bf16-mixed", "16-mixed", "32-true")


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision and why.

    Attributes:
        precision: One of Lightning's words.
        reason: Half a sentence for the user.
    """

    precision: Precision
    reason: str


def choose_precision(device: torch.device) -> PrecisionChoice:
    """Choose bf16 where the device computes in it, else fp16 on CUDA, else fp32."""
    return choose_precision_of(device.type, computes_in_bf16(device))


def choose_precision_of(kind: str, is_bf16: bool) -> PrecisionChoice:
    """Choose likewise for a kind of device, without one at hand."""
    if is_bf16:
        return PrecisionChoice("bf16-mixed", f"{kind} computes in bf16")
    if kind == "cuda":
        return PrecisionChoice("16-mixed", "this GPU has no bf16, so fp16 with a loss scaler")
    if kind == "cpu":
        return PrecisionChoice("32-true", "this CPU has neither AVX512-BF16 nor AMX")
    return PrecisionChoice("32-true", f"{kind} has no bf16")


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the device has bf16 arithmetic of its own, emulation not counted."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return bool(torch.cuda.is_bf16_supported())
        return torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported())
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return device.type == "cpu" and bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def cpu_flags() -> set[str]:
    """Return the features of this CPU, in Linux's spelling; empty where they aren't known."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(text.partition("flags")[2].partition("\n")[0].split())
