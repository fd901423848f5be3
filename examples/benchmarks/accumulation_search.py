"""The search of `AutoAccumulation` beside Lightning's `BatchSizeFinder` and bisection by hand.

    python examples/benchmarks/accumulation_search.py --out search.json    # 9 minutes at most
    python examples/benchmarks/accumulation_search.py --overhead --out overhead.json
    python examples/benchmarks/accumulation_search.py --cpu --models vit    # small, without OOM

ResNet-50 (channels_last), ViT-B/16 and a GPT of 302M parameters (24 layers of width 1024, 1024
bytes of context), AdamW, bf16-mixed, on a card made small to 8, 16 and 24 GiB. Each figure comes
from a process of its own, after one step that loads all kernels. For each method: sizes tried, how
often `training_step` ran for that, seconds, the size found, and that size as a share of the largest
that bisection by hand finds, for `AutoAccumulation` within its 90 % of the card, with the whole
batch there and gradients accumulating, for `BatchSizeFinder` on the whole card with a batch of its
own. The fit goes on with the size (`AutoAccumulation` with the one that it chose, without recovery)
until `--steps` micro-batches are done: its peak (reserved), speed, allocator retries, and end.

`--overhead` measures instead what `AutoAccumulation` costs where the batch fits and is not cut: the
median time of a step of about `--ms` of ViT-B/16, runs with and without it in turn in one process.

On a CPU small models run in fp32, a card of N GiB means N GiB more than what is resident at the
start, memory never runs out, and `BatchSizeFinder` ends at the size of the data.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18, resnet50, vit_b_16
from torchvision.models.vision_transformer import VisionTransformer

from lightning_memopt import AutoAccumulation, is_out_of_memory
from lightning_memopt.core.memory import memory_reader

GIB = 2**30
SHARE = 0.9  # of the card, as `AutoAccumulation(memory="90%")`
REPEATED = 64  # samples in host memory
TARGET_MS = 20.0
METHODS = ("AutoAccumulation", "BatchSizeFinder power", "BatchSizeFinder binsearch", "by hand")


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, depth: int, width: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position
        return self.head(self.layers(x, self.mask, is_causal=True))


def image_loss(net: nn.Module, images: Tensor) -> Tensor:
    """Return the loss of 8-bit images, each of the class that its first pixel says."""
    labels = images[:, 0, 0, 0].long()
    return functional.cross_entropy(net(images / 255), labels)


def channels_last_loss(net: nn.Module, images: Tensor) -> Tensor:
    return image_loss(net, images.contiguous(memory_format=torch.channels_last))


def text_loss(net: nn.Module, text: Tensor) -> Tensor:
    text = text.long()
    return functional.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model, its loss of a batch, the shape of a sample, and the samples of a large batch."""

    title: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    shape: tuple[int, ...]
    samples: int


IMAGE = (3, 224, 224)
CASES = {
    "cuda": {
        "resnet": Case("ResNet-50", resnet50, channels_last_loss, IMAGE, 1024),
        "vit": Case("ViT-B/16", vit_b_16, image_loss, IMAGE, 512),
        "gpt": Case("GPT 302M", partial(GPT, 24, 1024, 1024), text_loss, (1025,), 64),
    },
    "cpu": {
        "resnet": Case("ResNet-18", resnet18, channels_last_loss, (3, 32, 32), 32),
        "vit": Case(
            "small ViT",
            partial(VisionTransformer, 64, 8, 4, 3, 96, 384),
            image_loss,
            (3, 64, 64),
            32,
        ),
        "gpt": Case("small GPT", partial(GPT, 4, 64, 64), text_loss, (65,), 32),
    },
}


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    method: str
    model: str
    gib: float
    device: str
    steps: int

    @property
    def case(self) -> Case:
        return CASES[self.device][self.model]


class Samples(Dataset[Tensor]):
    """Any number of samples, few of them distinct: the host's time is no part of the figures."""

    def __init__(self, shape: tuple[int, ...], length: int) -> None:
        self.distinct = torch.randint(256, (REPEATED, *shape), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.distinct[torch.tensor(indices) % REPEATED]


def as_it_is(batch: Tensor) -> Tensor:
    return batch


class Seen:
    """The sizes of all batches, and of those to train with; nobody puts such an object back."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.trained: list[int] = []


class Model(LightningModule):
    """Trains a case; `batch_size` is the attribute that `BatchSizeFinder` sets."""

    def __init__(self, case: Case, batch_size: int, device: str) -> None:
        super().__init__()
        self.loss, self.batch_size = case.loss, batch_size
        with torch.device(device):  # on a CPU it would take seconds
            self.net = case.make()
        if case.loss is channels_last_loss:
            self.net.to(memory_format=torch.channels_last)
        # `BatchSizeFinder` never ends where it runs out of memory with all data in one batch.
        self.data = Samples(case.shape, case.samples * (16 if device == "cuda" else 2))
        self.seen = Seen()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.sizes.append(len(batch))
        if torch.is_grad_enabled():
            self.seen.trained.append(len(batch))
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.data, self.batch_size, collate_fn=as_it_is)


def clean_up(device: str) -> None:
    gc.collect()
    memory_reader(torch.device(device)).release_cache()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    memory_reader(torch.device(device)).reset_peak()


def peak_bytes(device: str) -> int:
    """Return what was reserved at most; on a CPU resident."""
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return memory_reader(torch.device(device)).read().peak or 0


def retries(device: str) -> int:
    return memory_reader(torch.device(device)).read().alloc_retries or 0


def autocast(device: str) -> Any:
    # As Lightning does it: without a cache of weights.
    return torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False)


def on_small_card(job: Job, batch_size: int) -> tuple[Model, dict[str, int], int | str]:
    """Make the card small.

    Returns:
        The model, on the device and warm; the bytes of 90 % of the card and of all of it; and the
        former as `AutoAccumulation` wants to be told.
    """
    if job.device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(job.gib * GIB / total)
    torch.manual_seed(0)
    model = Model(job.case, batch_size, job.device)
    with autocast(job.device):
        loss = model.loss(model.net, model.data.distinct[:2].to(job.device))
    loss.backward()
    model.zero_grad()
    del loss
    clean_up(job.device)
    is_cpu = job.device == "cpu"
    before = memory_reader(torch.device("cpu")).read().reserved if is_cpu else 0
    limits = {
        name: before + int(share * job.gib * GIB)
        for name, share in (("within 90 %", SHARE), ("whole card", 1.0))
    }
    return model, limits, limits["within 90 %"] if is_cpu else f"{SHARE:.0%}"


class Watch(Callback):
    """Notes what a fit takes after the search, and ends it."""

    def __init__(self, job: Job, seen: Seen) -> None:
        self.job, self.seen = job, seen
        self.search: Seen | None = None
        self.marks: list[tuple[float, int]] = []

    @property
    def done(self) -> list[int]:
        """The sizes of the micro-batches trained after the search."""
        return [] if self.search is None else self.seen.trained[len(self.search.trained) :]

    def on_train_batch_start(self, *_: Any) -> None:
        if self.search is None:
            self.search, self.retries = copy.deepcopy(self.seen), retries(self.job.device)
            reset_peak(self.job.device)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        done = self.done
        trainer.should_stop = len(done) >= self.job.steps
        if not self.marks or trainer.should_stop:  # the first step makes the optimizer's state
            synchronize(self.job.device)
            self.marks.append((time.perf_counter(), sum(done)))

    def figures(self) -> dict[str, Any]:
        search = self.search or self.seen
        figures: dict[str, Any] = {
            # Each trial of a method has a size of its own.
            "trials": len(set(search.trained)),
            "passes": len(search.sizes),
            "tried": list(dict.fromkeys(search.trained)),
        }
        if self.search is None:
            return figures
        figures["peak_bytes"] = peak_bytes(self.job.device)
        figures["retries"] = retries(self.job.device) - self.retries
        figures["steps"] = len(self.done)
        if len(self.marks) > 1:
            (begin, first), (end, last) = self.marks[0], self.marks[-1]
            figures["samples_per_s"] = (last - first) / (end - begin)
        return figures


def time_hook(callback: Callback, hook: str, device: str) -> list[float]:
    """Let a hook of a callback put its seconds into the list that is returned."""
    seconds: list[float] = []
    original = getattr(callback, hook)

    def run(*args: Any) -> None:
        begin = time.perf_counter()
        try:
            original(*args)
            synchronize(device)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(callback, hook, run)
    return seconds


def fit(job: Job, model: Model, tuner: Callback, hook: str) -> dict[str, Any]:
    """Search in a hook of `tuner` and go on training."""
    seconds, watch = time_hook(tuner, hook, job.device), Watch(job, model.seen)
    end = "ok"
    with tempfile.TemporaryDirectory() as root:
        trainer = make_trainer(job.device, tuner, watch, default_root_dir=root)
        try:
            trainer.fit(model)
        except Exception as error:
            end = "OOM" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            where = "in the search" if watch.search is None else f"at {len(watch.done)}"
            end = f"{end} {where}"
    return {"seconds": sum(seconds), "fit": end, **watch.figures()}


def make_trainer(device: str, *callbacks: Callback, **kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if device == "cuda" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **({"max_epochs": -1} | kwargs),
    )


def search_by_callback(job: Job) -> dict[str, Any]:
    is_auto = job.method == "AutoAccumulation"
    # `BatchSizeFinder` makes its first trial with the loader's own batch size.
    model, _, memory = on_small_card(job, job.case.samples if is_auto else 2)
    if is_auto:
        auto = AutoAccumulation(memory=memory, recover=False)
        return fit(job, model, auto, "on_train_start") | {
            "largest": auto.largest,
            "used": auto.chosen,
        }
    finder = BatchSizeFinder(job.method.split()[1])
    figures = fit(job, model, finder, "on_fit_start")
    return figures | {"largest": finder.optimal_batch_size, "used": model.batch_size}


def search_by_hand(job: Job) -> dict[str, Any]:
    """Bisect, once within 90 % and in parts of a large batch, once on the whole card."""
    model, limits, _ = on_small_card(job, 1)
    optimizer = model.configure_optimizers()
    data, most = model.data, job.case.samples
    rows = {}
    for name, limit in limits.items():
        is_part = name == "within 90 %"
        peaks: dict[int, int | None] = {}
        begin = time.perf_counter()
        low, high = 0, most + 1
        while high - low > max(1, low // 200):
            size = (low + high) // 2
            at_once = most if is_part else size
            batch = data.__getitems__(list(range(at_once))).to(job.device)
            peaks[size] = peak_of_steps(job, model, optimizer, batch, size, 2 if is_part else 1)
            del batch
            optimizer.zero_grad()
            clean_up(job.device)
            fits = (peaks[size] or math.inf) <= limit
            low, high = (size, high) if fits else (low, size)
        rows[name] = {
            "trials": len(peaks),
            "passes": len(model.seen.sizes),
            "tried": list(peaks),
            "seconds": time.perf_counter() - begin,
            "largest": low,
            "peak_bytes": peaks.get(low),
        }
        model.seen.sizes.clear()
    return rows


def peak_of_steps(
    job: Job,
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    size: int,
    parts: int,
) -> int | None:
    """Do two steps, with Lightning's zeroing after the first forward.

    Returns:
        The peak, `None` where memory ran out.
    """
    reset_peak(job.device)
    try:
        for _ in range(2):
            for i in range(parts):
                with autocast(job.device):
                    loss = model.training_step(batch[:size], 0)
                if i == 0:
                    optimizer.zero_grad()
                loss.backward()
                del loss
            optimizer.step()
        synchronize(job.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return peak_bytes(job.device)


def measure(job: Job) -> dict[str, Any]:
    """Do one job, in a process of its own."""
    if job.device == "cpu":
        torch.set_num_threads(1)
    with quiet():
        return search_by_hand(job) if job.method == "by hand" else search_by_callback(job)


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


class FreshProcesses:
    """A new process for each job; the next one imports its libraries while one works."""

    def __init__(self, device: str) -> None:
        # A fork of a process that has looked at CUDA could not use it.
        self._context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            self._context.set_forkserver_preload(["torchvision", "lightning_memopt"])
        self._spare: Any = self._start()

    def run(self, job: Job, seconds: float, is_last: bool) -> dict[str, Any]:
        """Return the result of `measure`, or why there is none."""
        process, pipe = self._spare
        self._spare = None if is_last else self._start()
        try:
            pipe.send(job)
            if not pipe.poll(seconds):
                return {"error": f"not done in {seconds:.0f} s"}
            result: dict[str, Any] = pipe.recv()
            return result
        except (EOFError, OSError):
            process.join()
            return {"error": f"its process ended with {process.exitcode}"}
        finally:
            process.kill()
            process.join()

    def close(self) -> None:
        if self._spare is not None:
            self._spare[0].kill()
            self._spare[0].join()

    def _start(self) -> tuple[Any, Any]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return process, here


def serve(pipe: Any) -> None:
    try:
        pipe.send(measure(pipe.recv()))
    except EOFError:
        pass
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def compare_searches(args: argparse.Namespace, device: str, figures: dict[str, Any]) -> Table:
    """Measure all that was asked for while there is time, and return the table."""
    jobs = [
        Job(method, model, gib, device, args.steps)
        for model in args.models
        for gib in args.gib
        for _ in range(args.rounds)
        for method in METHODS
    ]
    results: list[dict[str, Any]] = []
    figures |= {"steps": args.steps, "results": results}
    deadline = time.monotonic() + args.seconds
    processes = FreshProcesses(device)
    try:
        for i, job in enumerate(jobs):
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"No time left for {len(jobs) - i} of {len(jobs)} measurements")
                break
            begin = time.monotonic()
            result = processes.run(job, min(args.limit, left), i == len(jobs) - 1)
            took = f"{job.case.title}, {job.gib:g} GiB, {job.method}: {result.get('error', 'done')}"
            print(f"{took} ({time.monotonic() - begin:.1f} s)", flush=True)
            rows = result if job.method == "by hand" and "error" not in result else {"": result}
            for name, row in rows.items():
                method = f"{job.method}, {name}".removesuffix(", ")
                results.append({"model": job.case.title, "gib": job.gib, "method": method, **row})
            write(args.out, figures)
    finally:
        processes.close()
    return search_table(results)


def search_table(results: list[dict[str, Any]]) -> Table:
    """Return a row for each method, the median of its rounds."""
    table = Table(caption="of true: of the largest that bisection by hand finds in that memory")
    headings = "model|GiB|method|trials|passes|s|largest|of true|used|peak|samples/s|retries|fit"
    for i, heading in enumerate(headings.split("|")):
        table.add_column(heading, justify="left" if i in (0, 2, 12) else "right", no_wrap=i != 12)
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["model"], row["gib"], row["method"]), []).append(row)
    largest = {key: median(rows, "largest") for key, rows in groups.items()}
    last: tuple[str, float] | None = None
    for (model, gib, method), rows in groups.items():
        if last not in (None, (model, gib)):
            table.add_section()
        is_new, last = last != (model, gib), (model, gib)
        within = "within 90 %" if method == "AutoAccumulation" else "whole card"
        true = largest.get((model, gib, f"by hand, {within}"))
        mine = largest[model, gib, method]
        is_by_hand = method.startswith("by hand")
        ends = [row.get("error") or row.get("fit", "") for row in rows]
        peak = median(rows, "peak_bytes")
        table.add_row(
            model if is_new else "",
            f"{gib:g}" if is_new else "",
            method.replace("BatchSizeFinder", "Finder"),
            *(number(median(rows, key), digits) for key, digits in COUNTS),
            "" if is_by_hand or not true or mine is None else f"{mine / true:.3f}",
            "" if is_by_hand else number(median(rows, "used")),
            number(None if peak is None else peak / GIB, 2),
            number(median(rows, "samples_per_s"), 1),
            number(median(rows, "retries")),
            # One failure among several rounds is what matters.
            next((end for end in ends if end not in ("", "ok")), ends[0])[:40],
        )
    return table


COUNTS = (("trials", 0), ("passes", 0), ("seconds", 1), ("largest", 0))


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


class StepTimes(Callback):
    """The time of each step after a warm-up; last in `callbacks`, so that all others count."""

    def __init__(self, device: str, warm_up: int) -> None:
        self.device, self.warm_up = device, warm_up
        self.marks: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step < self.warm_up:
            return
        if not self.marks:
            synchronize(self.device)
            self.host = time.process_time()
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        if trainer.global_step == trainer.max_steps:
            synchronize(self.device)
            self.host = time.process_time() - self.host

    def figures(self) -> tuple[float, float]:
        """Return the median ms of a step, and its CPU time over all threads in ms."""
        if self.device == "cuda":
            times = [a.elapsed_time(b) for a, b in pairwise(self.marks)]
        else:
            times = [1000 * (b - a) for a, b in pairwise(self.marks)]
        return statistics.median(times), 1000 * self.host / len(times)


def time_steps(case: Case, device: str, batch: int, steps: int, *callbacks: Callback) -> Any:
    torch.manual_seed(0)
    model = Model(case, batch, device)
    data = model.data.__getitems__(list(range(batch))).to(device)
    warm_up = max(2, steps // 10)
    timer, total = StepTimes(device, warm_up), warm_up + steps
    trainer = make_trainer(device, *callbacks, timer, max_epochs=1, max_steps=total)
    trainer.fit(model, DataLoader([data] * total, batch_size=None))
    return timer.figures()


def compare_steps(args: argparse.Namespace, device: str, figures: dict[str, Any]) -> Table:
    """Time steps without the callback, with it, and with it but without recovery."""
    case = CASES[device][args.models[0]]
    small, large = (32, 96) if device == "cuda" else (1, 4)
    time_steps(case, device, small, 5)  # the first one pays for what is loaded lazily
    few, many = (time_steps(case, device, size, 20)[0] for size in (small, large))
    per_sample = max((many - few) / (large - small), 1e-3)
    batch = max(1, round(large + (args.ms - many) / per_sample))
    variants: dict[str, Callable[[], list[Callback]]] = {
        "no callback": lambda: [],
        "AutoAccumulation": lambda: [AutoAccumulation(micro_batch_size=batch)],
        "recover=False": lambda: [AutoAccumulation(micro_batch_size=batch, recover=False)],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(args.rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            measured = time_steps(case, device, batch, args.steps, *variants[name]())
            times[name].append(measured)
    figures |= {
        "model": case.title,
        "batch": batch,
        "steps": args.steps,
        "rounds": args.rounds,
        "rows": {
            name: {
                "step_ms": statistics.median(ms for ms, _ in times[name]),
                "host_ms": statistics.median(host for _, host in times[name]),
                # Of one round each, so that a drift of the clock is in both.
                "added": statistics.median(
                    a[0] / b[0] - 1 for a, b in zip(times[name], times["no callback"], strict=True)
                ),
                "rounds_ms": [ms for ms, _ in times[name]],
            }
            for name in names
        },
    }
    return step_table(figures)


def step_table(figures: dict[str, Any]) -> Table:
    title = f"A step of {figures['model']}, batch {figures['batch']}, not cut"
    table = Table("callback", title=title)
    for heading in ("ms", "added", "CPU ms"):
        table.add_column(heading, justify="right")
    for name, row in figures["rows"].items():
        table.add_row(
            name, f"{row['step_ms']:.3f}", f"{row['added']:+.2%}", f"{row['host_ms']:.3f}"
        )
    return table


def write(file: Path | None, figures: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(figures, indent=2))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("resnet", "vit", "gpt"))
    parser.add_argument("--gib", nargs="+", type=float, help="sizes of the card")
    parser.add_argument("--steps", type=int, help="micro-batches trained after the search")
    parser.add_argument("--rounds", type=int, help="repetitions, of which the median is shown")
    parser.add_argument("--limit", type=float, default=90, help="seconds for a measurement")
    parser.add_argument("--seconds", type=float, default=500, help="seconds for all of them")
    parser.add_argument("--overhead", action="store_true", help="time steps instead")
    parser.add_argument("--ms", type=float, default=TARGET_MS, help="step that is timed")
    parser.add_argument("--cpu", action="store_true", help="small models on the CPU")
    parser.add_argument("--out", type=Path, help="file to write the figures to, as JSON")
    args = parser.parse_args(argv)
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    args.models = args.models or (["vit"] if args.overhead else list(CASES[device]))
    args.gib = args.gib or ([8, 16, 24] if device == "cuda" else [0.1])
    args.steps = args.steps or (200 if args.overhead else 50)
    args.rounds = args.rounds or (5 if args.overhead else 1)

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    figures = {"device": name, "torch": torch.__version__}
    print(f"{name}, torch {torch.__version__}, {'bf16-mixed' if device == 'cuda' else 'fp32'}")
    with quiet():
        table = (compare_steps if args.overhead else compare_searches)(args, device, figures)
    write(args.out, figures)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
