"""Run out of memory on purpose, and read the report of it.

    python examples/out_of_memory.py
    python examples/out_of_memory.py --phase backward       # or optimizer, validation: on a GPU

A GPT is trained with `OOMReport` on a device that is made small: on a GPU by PyTorch's limit for a
process, set just below what the phase needs, which a first run without a limit measures; on a CPU
by the limit on the address space, where it is forward that fails. The report is printed, and is in
TensorBoard under "Text". `examples/oom_reports/` has those of a GPU.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from pathlib import Path

import torch
from gpt import CHARACTERS, GPT
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memopt import MemoryMonitor, OOMReport, is_out_of_memory

GPU = torch.cuda.is_available()
WIDTH, DEPTH, CONTEXT = (1024, 8, 512) if GPU else (64, 2, 128)
# Batch sizes of training and validation that make the phase the one that needs most.
BATCHES = {
    "forward": (48, 1),
    "backward": (48, 1),
    "optimizer": (1, 1),
    "validation": (2, 384),
}
PHASES = list(BATCHES if GPU else ("forward",))
ROOM_ON_CPU = 384 * 2**20
# Backward needs most in the first step only, while there is no optimizer state yet.
STEPS = {"backward": 1}
warnings.filterwarnings("ignore", ".*does not have many workers.*")


def batches(size: int, count: int) -> DataLoader[Tensor]:
    text = torch.randint(CHARACTERS, (count, size, CONTEXT + 1))
    return DataLoader(list(text), batch_size=None)


def fit(phase: str, *callbacks: Callback, logdir: Path, limit: int | None = None) -> None:
    """Train for a few steps, with at most so many bytes of the device."""
    seed_everything(0)
    model = GPT(WIDTH, DEPTH, CONTEXT)
    train, validation = BATCHES[phase]
    loaders = batches(train if GPU else 512, STEPS.get(phase, 4)), batches(validation, 1)
    trainer = Trainer(
        accelerator="gpu" if GPU else "cpu",
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        logger=TensorBoardLogger(logdir, name=None, version=""),
        log_every_n_steps=1,
    )
    if limit is not None:
        make_small(limit)
    trainer.fit(model, *loaders)


def make_small(limit: int) -> None:
    """Limit what this process may use: bytes of a GPU, or of address space beyond now."""
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        return
    import resource

    # Threads and libraries take address space when they are first used.
    model = GPT(WIDTH, DEPTH, CONTEXT)
    model(torch.zeros(4, CONTEXT, dtype=torch.long)).sum().backward()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + limit
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def limit_for(phase: str, logdir: Path) -> int:
    """Return a limit that only this phase exceeds, from a run without one."""
    if not GPU:
        return ROOM_ON_CPU
    monitor = MemoryMonitor(verbose=False)
    fit(phase, monitor, logdir=logdir / "without_limit")
    peaks = {name: figures["peak_bytes"] for name, figures in monitor.summary()["phases"].items()}
    needed = peaks["val" if phase == "validation" else phase]
    if phase in ("forward", "backward"):
        return int(needed * {"forward": 0.6, "backward": 0.99}[phase])
    return (needed + max(peaks["forward"], peaks["backward"])) // 2


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", choices=PHASES, default="forward")
    parser.add_argument("--logdir", type=Path, default=Path("logs/out_of_memory"))
    args = parser.parse_args(argv)

    limit = limit_for(args.phase, args.logdir)
    logdir = args.logdir / args.phase
    try:
        fit(args.phase, OOMReport(), MemoryMonitor(verbose=False), logdir=logdir, limit=limit)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    newest = max((logdir / "oom").glob("*.txt"), key=lambda file: file.stat().st_mtime)
    print(f"\n{newest.read_text(encoding='utf-8')}")
    print(f"tensorboard --logdir {args.logdir}")


if __name__ == "__main__":
    main()
