"""The random states that training draws from: PyTorch's, the device's, Python's and NumPy's."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_MT19937_BYTES = 4 * (624 + 1)  # its key and the position in it
_last: tuple[bytes, Any] | None = None


def host_random_states() -> tuple[Any, Any]:
    """Return the states of Python and NumPy, `None` for a NumPy that nobody has imported."""
    numpy = sys.modules.get("numpy")  # who has not imported it has not drawn from it
    return random.getstate(), None if numpy is None else _numpy_state(numpy.random)


def set_host_random_states(python: Any, numpy_state: Any) -> None:
    """Put back what `host_random_states` returned."""
    random.setstate(python)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def _numpy_state(module: Any) -> Any:
    """Return NumPy's state, the last one where nothing was drawn since: reading it is slow."""
    global _last
    generator: Any = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":  # or a NumPy before 1.24
        return module.get_state()
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    if _last is None or _last[0] != raw:
        state = module.get_state()
        # A normal number that is kept for the next call leaves no mark in `raw` when it is used.
        is_one_kept = state[3]
        _last = None if is_one_kept else (raw, state)
        return state
    return _last[1]


class RandomState:
    """All random states of this moment, to be put back once or several times.

    Args:
        device: The device whose generator is looked at beside the CPU's; `None` looks at Python's
            and NumPy's alone.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._host = host_random_states()
        self._torch = self._of_device = None
        if device is not None:
            self._torch = torch.get_rng_state()
            if device.type != "cpu":
                module: Any = torch.get_device_module(device)
                self._of_device = module.get_rng_state(*_index(device))

    def put_back(self) -> None:
        """Make every generator go on from here."""
        set_host_random_states(*self._host)
        if self._torch is not None:
            torch.set_rng_state(self._torch)
        if self._device is not None and self._of_device is not None:
            module: Any = torch.get_device_module(self._device)
            module.set_rng_state(self._of_device, *_index(self._device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is one, and no argument
