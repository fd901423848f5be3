"""What watching memory costs: a step with no callback, with each that watches, and with a peer.

    python examples/benchmarks/monitor_cost.py
    python examples/benchmarks/monitor_cost.py --rounds 1 --steps 20 --large-steps 10    # seconds

The same small Lightning model is trained with each of them, TensorBoard and `log_every_n_steps=1`,
in one process; every round takes them in another order. The peers are Lightning's
`DeviceStatsMonitor` and, for `OOMReport` on a GPU, PyTorch's record of allocations as it is when
switched on by hand. Two sizes: a step that waits for the CPU (small kernels, about 2.75 ms) and
one that the device fills (about 20 ms); the depth that takes so long is measured first. A figure is
the wall time of many steps, with the device synchronized at both ends, divided by their number;
added time compares runs of one round, and the table has the median over rounds. CPU time is that of
all threads of the process: it tells what a callback costs where other programs disturb the wall
time.

Goals for `MemoryMonitor` on a GPU: at most 5 % of a 2.75 ms step, at most 0.5 % of a 20 ms step,
and under 1 KB of events a step. On a GPU the last line is the price of a failure: writing a full
record of 100,000 allocations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
import timeit
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt import MemoryMonitor, MemoryProfiler, OOMReport, read_memory
from lightning_memopt.core.growth import GrowthWatch
from lightning_memopt.core.memory_history import recorded_history, save_snapshot, take_snapshot
from lightning_memopt.core.tensor_holders import bytes_at_hand

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# name: target in ms, width, batch
SIZES = {
    "cuda": {"waits for the CPU": (2.75, 64, 32), "fills the GPU": (20.0, 4096, 2048)},
    "cpu": {"small": (3.0, 16, 4), "large": (20.0, 512, 128)},
}
ENTRIES = 100_000


class RecordByHand(Callback):
    """PyTorch's record of allocations, with the stacks that it has by default."""

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        torch.cuda.memory._record_memory_history(None)


WATCHERS: dict[str, Any] = {
    "none": lambda: [],
    "MemoryMonitor": lambda: [MemoryMonitor(verbose=False)],
    "MemoryMonitor(phases=False)": lambda: [MemoryMonitor(phases=False, verbose=False)],
    "OOMReport": lambda: [OOMReport(max_entries=ENTRIES)],
    # Its one step is in the warm-up: these are the steps after it.
    "MemoryProfiler, later": lambda: [MemoryProfiler(steps=[0])],
    "DeviceStatsMonitor": lambda: [DeviceStatsMonitor()],
}
if DEVICE == "cuda":
    WATCHERS["PyTorch's record"] = lambda: [RecordByHand()]
# DeviceStatsMonitor slows a step so much that two rounds tell, and more would take minutes.
PEER_ROUNDS = 2


class Net(LightningModule):
    """`depth` layers of `width`, trained on one batch that is on the device already."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class WallTime(Callback):
    """The time of the steps after a warm-up; last in `callbacks`, so that all others count."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        steps = trainer.global_step
        if steps in (self.warm_up, trainer.max_steps):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter(), time.process_time()
            if steps == self.warm_up:
                self.begin = now
            else:
                self.step_ms, self.host_ms = (
                    1000 * (end - begin) / (steps - self.warm_up)
                    for begin, end in zip(self.begin, now, strict=True)
                )


def fit(
    callbacks: list[Callback], depth: int, width: int, batch: int, steps: int
) -> tuple[float, float, float]:
    """Train; return a step's ms, its CPU time over all threads in ms, and its bytes of events."""
    torch.manual_seed(0)
    warm_up = max(1, steps // 10)
    timer = WallTime(warm_up)
    total = warm_up + steps
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            accelerator="gpu" if DEVICE == "cuda" else "cpu",
            devices=1,
            max_steps=total,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, timer],
            logger=TensorBoardLogger(root),
        )
        data = [torch.randn(batch, width, device=DEVICE)] * total
        trainer.fit(Net(depth, width), DataLoader(data, batch_size=None))
        written = sum(file.stat().st_size for file in Path(root).rglob("events.*"))
    return timer.step_ms, timer.host_ms, written / total


def find_depth(target_ms: float, width: int, batch: int, steps: int) -> int:
    """Return the depth at which a step without any callback takes about `target_ms`."""
    shallow, deep = 2, 6 if width > 64 else 22
    fit([], shallow, width, batch, steps)  # the first one pays for what is loaded lazily
    low, high = (fit([], depth, width, batch, steps)[0] for depth in (shallow, deep))
    per_layer = max((high - low) / (deep - shallow), 1e-3)
    return max(1, round(shallow + (target_ms - low) / per_layer))


def measure(size: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return the medians of one size, by watcher."""
    target, width, batch = SIZES[DEVICE][size]
    depth = find_depth(target, width, batch, steps)
    times: dict[str, list[float]] = {name: [] for name in WATCHERS}
    host_times: dict[str, list[float]] = {name: [] for name in WATCHERS}
    added: dict[str, list[float]] = {name: [] for name in WATCHERS}
    written: dict[str, float] = {}
    names = list(WATCHERS)
    for round_ in range(rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            if name != "DeviceStatsMonitor" or round_ < PEER_ROUNDS:
                ms, host_ms, written[name] = fit(WATCHERS[name](), depth, width, batch, steps)
                times[name].append(ms)
                host_times[name].append(host_ms)
        for name in names:
            if len(times[name]) > round_:
                added[name].append(times[name][-1] / times["none"][-1] - 1)
    return {
        name: {
            "step_ms": statistics.median(times[name]),
            "host_ms": statistics.median(host_times[name]),
            "added": statistics.median(added[name]),
            "event_bytes_per_step": written[name],
            "rounds": len(times[name]),
        }
        for name in names
    } | {"depth": depth, "width": width, "batch": batch, "steps": steps}


def leak_watch_us() -> float:
    """Return the microseconds that the leak watch takes in a step."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    held = [torch.ones(8, 8, device=device), torch.ones(8, device=device)], torch.ones(())
    watches, steps = (GrowthWatch(), GrowthWatch()), itertools.count()

    def watch() -> None:
        at_hand, step = bytes_at_hand(held, device), next(steps)
        watches[0].add(step, 2**30)
        watches[1].add(step, 2**30 - at_hand)

    return 1e6 * min(timeit.repeat(watch, number=10_000)) / 10_000


def dump() -> tuple[float, float, float]:
    """Return a full record's bytes per entry on the host, the seconds to write it, and its MiB."""
    device = torch.device(DEVICE, 0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50))).to(device)
    with recorded_history(device, ENTRIES), tempfile.TemporaryDirectory() as root:
        before = read_memory("cpu").reserved
        for _ in range(ENTRIES // 200):  # an allocation and two events of a free for each layer
            layers(torch.ones(8, 64, device=device)).sum().backward()
        per_entry = (read_memory("cpu").reserved - before) / ENTRIES
        path = Path(root) / "snapshot.pickle"
        begin = time.perf_counter()
        snapshot = take_snapshot(device)
        assert snapshot is not None
        assert len(snapshot["device_traces"][0]) == ENTRIES
        save_snapshot(snapshot, path)
        return per_entry, time.perf_counter() - begin, path.stat().st_size / 2**20


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what Lightning says at the start of each of the many fits off the screen."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300, help="timed steps of the small size")
    parser.add_argument("--large-steps", type=int, default=100, help="and of the large one")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    table = Table(title=f"A step on {name}, torch {torch.__version__}")
    for heading in ("step", "callback", "ms", "added", "CPU ms", "event bytes"):
        table.add_column(heading, justify="left" if heading in ("step", "callback") else "right")
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for size, steps in zip(SIZES[DEVICE], (args.steps, args.large_steps), strict=True):
        with quiet():
            result = figures[size] = measure(size, args.rounds, steps)
        for watcher in WATCHERS:
            row = result[watcher]
            table.add_row(
                size,
                watcher,
                f"{row['step_ms']:.3f}",
                f"{row['added']:+.2%}",
                f"{row['host_ms']:.3f}",
                f"{row['event_bytes_per_step']:,.0f}",
            )
        table.add_section()
    times = timeit.repeat(lambda: read_memory(DEVICE), timer=time.process_time, number=500)
    figures["read_us"] = 1e6 * min(times) / 500
    figures["watch_us"] = leak_watch_us()
    Console().print(table)
    print(f"One call of read_memory: {figures['read_us']:.1f} us")
    print(f"A step of the leak watch: {figures['watch_us']:.2f} us")
    if DEVICE == "cuda":
        per_entry, seconds, size = dump()
        figures |= {"entry_bytes": per_entry, "dump_s": seconds, "dump_mib": size}
        print(f"A record of {ENTRIES:,} entries: {per_entry:.0f} bytes an entry on the host,")
        print(f"written in {seconds:.2f} s, {size:.1f} MiB")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
