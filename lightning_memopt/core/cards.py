"""GPUs by name, for estimates on a machine that has none of them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memopt.core.units import MIB, parse_size

# Memory as PyTorch reports it, in MiB, and the bytes of a cuBLAS workspace in MiB: 32 from Hopper
# on, 8.125 before. H200 was read from the card, others are makers' data sheets less 1 % that the
# driver keeps.
_HOPPER, _BEFORE = 32.0, 8.125
_CARDS = {
    "h200": (143_156, _HOPPER),
    "h100": (81_000, _HOPPER),
    "a100-80gb": (81_000, _BEFORE),
    "a100-40gb": (40_300, _BEFORE),
    "l40s": (45_500, _BEFORE),
    "l4": (22_500, _BEFORE),
    "a10": (22_500, _BEFORE),
    "v100-32gb": (32_400, _BEFORE),
    "v100-16gb": (16_100, _BEFORE),
    "t4": (14_900, _BEFORE),
    "rtx-4090": (24_000, _BEFORE),
    "rtx-3090": (24_000, _BEFORE),
}
CONTEXT = 600 * MIB  # of a CUDA process with PyTorch's kernels loaded


@dataclass(frozen=True)
class Card:
    """What an estimate needs to know of a GPU.

    Attributes:
        name: Its name.
        usable: Bytes that PyTorch's allocator may reserve, `None` where there is no limit.
        library_bytes: Bytes of a cuBLAS workspace.
    """

    name: str
    usable: int | None
    library_bytes: int


def find_card(device: str) -> Card:
    """Return a card by its name, or one of a size.

    Args:
        device: A name such as `"h200"`, or the memory of any other CUDA GPU such as `"24GiB"`.

    Raises:
        ValueError: It is neither.
    """
    name = device.lower().replace("_", "-").replace(" ", "-")
    if name in _CARDS:
        total, library = _CARDS[name]
        return Card(name, total * MIB - CONTEXT, int(library * MIB))
    if name == "cuda":
        return Card(name, None, int(_HOPPER * MIB))
    try:
        size = parse_size(device, "device")
        if size.is_share:
            raise ValueError
    except ValueError:
        known = ", ".join(_CARDS)
        raise ValueError(
            f"`device` must be `cuda`, `cpu`, a size such as `24GiB` or one of {known}, got "
            f"{device!r}."
        ) from None
    return Card(device, size.of(0) - CONTEXT, int(_BEFORE * MIB))
