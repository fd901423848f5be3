"""Two real processes on this CPU that train as the two ranks of one run."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.models import make_trainer

TIME_LIMIT_S = 100


def run_two_ranks(fit: Callable[[int], Any], directory: Path) -> list[Any]:
    """Call `fit(rank)` in two processes that find each other and return what each one returns.

    `fit` is a function of a module, and makes its Trainers by `make_rank_trainer`.
    """
    # A server that has imported Lightning once, and no thread, forks faster than Python starts.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[Any] = [
        context.Process(target=_run_rank, args=(fit, rank, port, directory)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(TIME_LIMIT_S)
        assert [rank.exitcode for rank in ranks] == [0, 0]  # the error is in the captured output
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def make_rank_trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    """Make the Trainer of one of two ranks; each rank's loader is its own business."""
    return make_trainer(
        *callbacks,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        **kwargs,
    )


def _run_rank(fit: Callable[[int], Any], rank: int, port: int, directory: Path) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(1)
    torch.save(fit(rank), directory / f"{rank}.pt")
