"""Predicted peaks of training steps beside measured ones, over many models, sizes and precisions.

    python examples/benchmarks/estimate_accuracy.py                      # on a GPU, ten minutes
    python examples/benchmarks/estimate_accuracy.py --models resnet50 gpt --out figures.jsonl
    python examples/benchmarks/estimate_accuracy.py --predict-only --models gpt  # on any machine
    python examples/benchmarks/estimate_accuracy.py --table figures.jsonl  # what was found before

`estimate` runs in processes that see no GPU, for the models of `model_zoo.py`, each with three
batch sizes in fp32 and bf16-mixed, trained with AdamW. Meanwhile three steps of each are run on
the GPU, each from an empty allocator, and their `max_memory_allocated` is read. Beside it stands
what `accelerate estimate-memory` says for training with Adam: a multiple of the weights, whatever
the batch. Goal: within 5 % for at least 20 models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from model_zoo import ZOO, Entry
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_memopt import estimate
from lightning_memopt.core.training_step import precision_context, run_step

PRECISIONS = ("32-true", "bf16-mixed")
STEPS, GOAL, MIB = 3, 0.05, 2**20

Case = tuple[str, int, str]


def predict(case: Case) -> dict[str, Any]:
    """Predict the peak of a case."""
    name, size, precision = case
    entry = ZOO[name]
    begin = time.perf_counter()
    module = _without_weights(entry)
    found = estimate(module, entry.batch(size), precision, "AdamW")
    if found.reason:  # a rough figure needs weights
        found = estimate(entry.make(), entry.batch(size), precision, "AdamW")
    return {
        "predicted": found.anatomy.peak,
        "predicted_reserved": found.anatomy.reserved,
        "reason": found.reason,
        "seconds": round(time.perf_counter() - begin, 1),
        "accelerate": _accelerate(module, precision),
    }


def _without_weights(entry: Entry) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return entry.make()
    except (NotImplementedError, RuntimeError):  # weights are read while it is made
        return entry.make()


def _accelerate(module: torch.nn.Module, precision: str) -> int | None:
    """Return what `accelerate estimate-memory` says of training with Adam."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    size, _ = calculate_maximum_sizes(module)
    dtype = "float32" if precision == "32-true" else "bfloat16"
    return int(max(estimate_training_usage(size, dtype).values()))


def measure(case: Case) -> dict[str, Any]:
    """Run three steps of a case on the GPU and return their peak."""
    name, size, precision = case
    _empty()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.device("cuda"):
            torch.manual_seed(0)
            module, batch = ZOO[name].make().train(), ZOO[name].batch(size)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(STEPS):
            run_step(module, [optimizer], [batch], lambda: precision_context(precision, "cuda"))
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"measured": peak - held, "measured_reserved": reserved, "held": held}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _empty() -> None:
    """Give back what earlier cases and libraries hold."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(cases: list[Case], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict in worker processes and measure here; return a row a case."""
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + arguments.time_limit
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), _hide_gpus) as pool:
        predictions = [pool.submit(predict, case) for case in cases]
        for case, prediction in zip(cases, predictions, strict=True):
            if time.monotonic() > end:
                print(f"time is up after {len(rows)} of {len(cases)} cases", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                break
            row: dict[str, Any] = dict(zip(("model", "samples", "precision"), case, strict=True))
            row |= {} if arguments.predict_only else measure(case)
            try:
                row |= prediction.result(timeout=max(1.0, end - time.monotonic()))
            except Exception as error:  # one model's failure is a row of the table
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(row)
            _write(row, arguments.out)
            print(_line(row), flush=True)
    return rows


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _write(row: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def error_of(row: dict[str, Any], by: str = "predicted") -> float | None:
    """Return how far a prediction is off, as a fraction of what was measured."""
    if row.get("measured") and row.get(by):
        return float(row[by] / row["measured"] - 1)
    return None


def _line(row: dict[str, Any]) -> str:
    error = error_of(row)
    off = "" if error is None else f"{error:+.1%}"
    about = row.get("error") or row.get("reason", "")
    return f"{row['model']} {row['samples']} {row['precision']} {off} {about}".strip()


def show(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Print the error of each case, and how many models are within the goal."""
    table = Table("model", "precision", box=SIMPLE)
    for name in ("samples", "measured MiB", "predicted MiB", "error", "accelerate", "reserved"):
        table.add_column(name, justify="right")
    rows = sorted(rows, key=lambda row: (list(ZOO).index(row["model"]), row["precision"]))
    for row in rows:
        reserved = row.get("predicted_reserved"), row.get("measured_reserved")
        table.add_row(
            row["model"],
            row["precision"],
            str(row["samples"]),
            _mib(row.get("measured")),
            _mib(row.get("predicted")) + ("*" if row.get("reason") else ""),
            row.get("error") or _percent(error_of(row)),
            _percent(error_of(row, "accelerate")),
            _percent(reserved[0] / reserved[1] - 1 if all(reserved) else None),
        )
    console.print(table)
    console.print("* rough: the step can't be traced")
    traced = [row for row in rows if not row.get("reason") and error_of(row) is not None]
    if not traced:
        return
    errors = [abs(error_of(row) or 0) for row in traced]
    good = {row["model"] for row in traced} - {
        row["model"] for row in traced if abs(error_of(row) or 0) > GOAL
    }
    peers = [abs(error_of(row, "accelerate") or 0) for row in traced if row.get("accelerate")]
    console.print(
        f"{sum(e <= GOAL for e in errors)} of {len(errors)} cases within {GOAL:.0%}, "
        f"{len(good)} of {len({row['model'] for row in traced})} models in all their cases; "
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        + (f"; accelerate's median error {statistics.median(peers):.0%}" if peers else "")
    )


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--sizes", type=int, default=3, help="batch sizes of each model, 1 to 3")
    parser.add_argument("--predict-only", action="store_true", help="without a GPU")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON a case")
    parser.add_argument("--table", type=Path, help="only print the table of such a file")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    arguments = parser.parse_args(argv)
    console = Console(width=110)
    if arguments.table is not None:
        show(map(json.loads, arguments.table.read_text().splitlines()), console)
        return
    if not arguments.predict_only and not torch.cuda.is_available():
        parser.error("measuring needs a GPU; `--predict-only` does without")
    # Each size of all models before the next: a time limit then leaves no model out.
    cases = [
        (name, ZOO[name].sizes[number], precision)
        for number in range(arguments.sizes)
        for name in arguments.models
        for precision in PRECISIONS
    ]
    show(run(cases, arguments), console)


if __name__ == "__main__":
    main()
