"""The simulated allocator against the real one, after every operation.

What is recorded runs in a process of its own, which allocates nothing else: this file as a script.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_memopt.core.caching_allocator import (
    Block,
    CachingAllocator,
    SimulatedOutOfMemoryError,
)
from lightning_memopt.core.units import MIB

ROOT = Path(__file__).parents[2]
OPERATIONS = 2000
MAX_LIVE = 3072 * MIB
LIMIT = 1025 * MIB  # no whole number of segments, so that how a fraction is rounded doesn't matter
EDGES = (512, MIB, 2 * MIB, 10 * MIB, 11 * MIB, 20 * MIB)
AROUND = (-513, -512, -511, -1, 0, 1, 511, 512, 513)
SIZES: dict[str, Callable[[random.Random], int]] = {
    "small": lambda draw: draw.randint(1, MIB),
    "medium": lambda draw: draw.randint(MIB, 12 * MIB),
    "large": lambda draw: draw.randint(1, 200 * MIB),
    "any": lambda draw: int(2 ** draw.uniform(0, 27.6)),
    "few": lambda draw: draw.choice([0, 1, 4096, MIB, MIB + 1, 3 * MIB, 10 * MIB, 64 * MIB]),
    "edges": lambda draw: max(1, draw.choice(EDGES) + draw.choice(AROUND)),
}
FREE = [f"{name}-{seed}" for name in SIZES for seed in range(2)]
LIMITED = [f"{name}-limited" for name in ("medium", "large", "any")]
FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
}
CALLS = {"empty_cache": "empty_cache", "reset_peaks": "reset_peak_memory_stats"}


class Event(NamedTuple):
    """One operation on the device, and what the device said after it.

    Attributes:
        action: What was done: allocate, fail (to allocate), free, empty_cache or reset_peaks.
        key: The tensor it was done to.
        size: Bytes of the tensor.
        address: Where the tensor is.
        figures: In the order of `FIGURES`; empty if they weren't read.
    """

    action: str
    key: int
    size: int
    address: int
    figures: Sequence[int]


# The simulation: what was recorded is done again without the device


class Again:
    """Does what was recorded in a simulation, and keeps the first difference.

    Args:
        events: What was recorded.
        limit: Bytes that may be reserved.
        knows_addresses: Whether segments lie where they lay on the device.
    """

    def __init__(self, events: Sequence[Event], limit: int | None, knows_addresses: bool) -> None:
        self.address: int = 0
        place = (lambda size: self.address) if knows_addresses else None
        self.allocator = CachingAllocator(limit, place)
        self.knows_addresses = knows_addresses
        self.blocks: dict[int, Block] = {}
        self.first_difference = ""
        for index, event in enumerate(events):
            wrong = [*self.do(event), *self.compare(event)]
            if wrong and not self.first_difference:
                what = f"{event.action}({event.size:,})" if event.size else event.action
                self.first_difference = f"operation {index}, {what}: {'; '.join(wrong)}"

    def do(self, event: Event) -> list[str]:
        if event.action == "empty_cache":
            self.allocator.empty_cache()
        elif event.action == "reset_peaks":
            self.allocator.reset_peaks()
        elif event.action == "free":
            if event.key in self.blocks:
                self.allocator.free(self.blocks.pop(event.key))
        else:
            return self.allocate(event)
        return []

    def allocate(self, event: Event) -> list[str]:
        self.address = event.address
        try:
            block = self.allocator.allocate(event.size)
        except SimulatedOutOfMemoryError as error:
            return [] if event.action == "fail" else [f"out of memory in the simulation: {error}"]
        if event.action == "fail":
            self.allocator.free(block)
            return ["out of memory on the device alone"]
        self.blocks[event.key] = block
        if self.knows_addresses and block.address != event.address:
            return [f"address {block.address:#x}, on the device {event.address:#x}"]
        return []

    def compare(self, event: Event) -> list[str]:
        pairs = zip(FIGURES, event.figures, strict=True) if event.figures else ()
        return [
            f"{name} {here:,}, on the device {there:,}"
            for name, there in pairs
            if (here := getattr(self.allocator, name)) != there
        ]


# The tests


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Event]]:
    path = tmp_path_factory.mktemp("allocator") / "events.json"
    settings = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_caching_allocator_gpu", str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in settings},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(path.read_text())
    return {case: [Event(*event) for event in events] for case, events in cases.items()}


@pytest.mark.parametrize("case", FREE + LIMITED)
def test_each_operation_changes_what_the_device_says_it_changes(
    recorded: dict[str, list[Event]], case: str
) -> None:
    events = recorded[case]
    assert len(events) == OPERATIONS
    assert max(event.figures[3] for event in events) > MIB
    assert any(event.action == "fail" for event in events) == (case in LIMITED)
    again = Again(events, LIMIT if case in LIMITED else None, knows_addresses=True)
    assert again.first_difference == ""


@pytest.mark.parametrize("case", [*FREE, "training"])
def test_peaks_are_told_without_the_addresses(recorded: dict[str, list[Event]], case: str) -> None:
    events = recorded[case]
    again = Again(events, None, knows_addresses=False)
    told = again.allocator.peak_allocated, again.allocator.peak_reserved
    real = tuple(events[-1].figures[3:])
    assert min(real) > 0
    why = f"{told} for {real}; first {again.first_difference}; segments: {order(events)}"
    assert told == pytest.approx(real, rel=0.05), why


def test_a_training_is_told_exactly(recorded: dict[str, list[Event]]) -> None:
    events = recorded["training"]
    assert sum(event.action == "allocate" for event in events) > 500
    again = Again(events, None, knows_addresses=True)
    assert again.first_difference == ""


def order(events: Sequence[Event]) -> str:
    """Return how often the driver put a segment above the one before."""
    starts, before = [], 0
    for event in events:
        if event.figures and event.action == "allocate":
            if event.figures[1] > before:
                starts.append(event.address)
            before = event.figures[1]
    rises = sum(low < high for low, high in pairwise(starts))
    return f"{len(starts)}, {rises} of them above the one before"


# The device


def read() -> list[int]:
    stats = torch.cuda.memory_stats()
    return [stats.get(key, 0) for key in FIGURES.values()]


def record(size_of: Callable[[random.Random], int], seed: int, limit: int | None) -> list[Event]:
    """Allocate and free at random on the device."""
    forget()
    draw, events = random.Random(seed), list[Event]()
    live: list[tuple[int, torch.Tensor]] = []
    for index in range(OPERATIONS):
        kind, size = draw.random(), size_of(draw)
        is_full = limit is None and sum(t.nbytes for _, t in live) + size > MAX_LIVE
        action, key, address = "allocate", index, 0
        if kind < 0.01:
            action, size = ("empty_cache" if kind < 0.005 else "reset_peaks"), 0
            getattr(torch.cuda, CALLS[action])()
        elif live and (is_full or kind > 0.6):
            key, tensor = live.pop(draw.randrange(len(live)))
            action, size = "free", tensor.nbytes
            del tensor
        else:
            try:
                live.append((key, torch.empty(size, dtype=torch.uint8, device="cuda")))
                address = live[-1][1].data_ptr()
            except torch.OutOfMemoryError:
                action = "fail"
        events.append(Event(action, key, size, address, read()))
    return events


def record_training() -> list[Event]:
    """Train on the device, and return what PyTorch's own trace says was allocated and freed."""
    forget()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (128, 200, 96, 256):
        loss = model(torch.randn(16, length, 512, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    figures = read()
    (trace,) = (each for each in torch.cuda.memory._snapshot()["device_traces"] if each)
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = {"alloc": "allocate", "free_completed": "free"}
    events = [
        Event(actions[each["action"]], each["addr"], each["size"], each["addr"], ())
        for each in trace
        if each["action"] in actions
    ]
    if len({each["stream"] for each in trace if each["action"] in actions}) != 1:
        raise RuntimeError("the training used several streams")
    return [*events[:-1], events[-1]._replace(figures=figures)]


def forget() -> None:
    """Leave the process with nothing allocated, as it began."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if any(left := read()):
        raise RuntimeError(f"something is still allocated: {dict(zip(FIGURES, left, strict=True))}")


def main(path: str) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    cases: dict[str, Any] = {}
    for case in FREE:
        name, seed = case.split("-")
        cases[case] = record(SIZES[name], int(seed), None)
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.mem_get_info()[1])
    for case in LIMITED:
        cases[case] = record(SIZES[case.split("-")[0]], 0, LIMIT)
    torch.cuda.set_per_process_memory_fraction(1.0)
    # Last, since cuBLAS keeps its workspace.
    cases["training"] = record_training()
    Path(path).write_text(json.dumps(cases))


if __name__ == "__main__":
    main(sys.argv[1])
