"""Which GPUs, and MIG instances of them, `CUDA_VISIBLE_DEVICES` leaves to a process.

The rules are those of NVIDIA's [CUDA guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/)
and [MIG guide](https://docs.nvidia.com/datacenter/tesla/mig-user-guide/): a process sees one MIG
instance at most, the first of those left to it, and then no other GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from lightning_memopt.core.machine_facts import Device

VARIABLE = "CUDA_VISIBLE_DEVICES"
OUTSHONE = "a process can use one MIG instance only"


def show_visible(devices: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """Return the devices with torch's names for those that a process can use, these first.

    Args:
        devices: All devices in the driver's order, MIG instances in place of cards cut into them;
            those with `hidden_by` are none that a process could use.
        variable: What `CUDA_VISIBLE_DEVICES` is set to, `None` if it isn't.
    """
    chosen = _chosen(devices, variable)
    seen = [each for each in chosen if each.mig_card is not None][:1] or chosen
    visible = [replace(each, torch_name=f"cuda:{at}") for at, each in enumerate(seen)]
    hidden = []
    for device in devices:
        if device not in seen:
            reason = OUTSHONE if device in chosen else VARIABLE
            hidden.append(replace(device, hidden_by=device.hidden_by or reason))
    return (*visible, *hidden)


def _chosen(devices: Sequence[Device], variable: str | None) -> list[Device]:
    usable = [device for device in devices if device.hidden_by is None]
    if variable is None:
        return usable
    chosen: list[Device] = []
    for entry in variable.split(","):
        found = _named(devices, entry.strip())
        # From the first entry that names nothing on, CUDA reads no further.
        if found is None:
            break
        if found in chosen:
            return []
        chosen.append(found)
    return [device for device in chosen if device.hidden_by is None]


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.startswith(("GPU-", "MIG-")):
        found = [device for device in devices if device.uuid.startswith(entry)]
        # The name of a card that is cut stands for its first instance.
        found = found or [each for each in devices if (each.mig_card or "").startswith(entry)][:1]
        return found[0] if len(found) == 1 else None
    number = re.match(r"\+?\d+", entry)
    cards: dict[str, Device] = {}
    for device in devices:
        cards.setdefault(device.mig_card or device.uuid, device)
    at = int(number[0]) if number else len(cards)
    return list(cards.values())[at] if at < len(cards) else None
