"""The curves as a user sees them: a real fit, the real TensorBoard server, its HTTP interface."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memopt import MemoryMonitor
from tests.models import Blocks, make_trainer

DEADLINE_S = 60
STEPS = 6  # optimizer steps: 24 samples in batches of 4
CURVES = ("memory/allocated_gib", "memory/reserved_gib", "memory/peak_allocated_gib")

Get = Callable[..., Any]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorboard")
    logger = TensorBoardLogger(folder, name=None, version="run")
    trainer = make_trainer(MemoryMonitor(), logger=logger, log_every_n_steps=1)
    trainer.fit(Blocks())
    assert trainer.global_step == STEPS
    return folder


@pytest.fixture(scope="module")
def get(logged: Path) -> Iterator[Get]:
    """Start a server over the logged run; yields a function that reads one of its routes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logged)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load_fast=false"]
    output = logged / "server.txt"
    with output.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)

    def read(route: str, until: Callable[[Any], bool] = bool, **query: str) -> Any:
        address = f"http://127.0.0.1:{port}/data/{route}?{urlencode(query)}"
        deadline = time.monotonic() + DEADLINE_S
        found: Any = None
        while time.monotonic() < deadline:
            assert server.poll() is None, output.read_text()[-2000:]
            try:
                with urlopen(address, timeout=DEADLINE_S) as response:
                    found = json.load(response)
            except HTTPError as error:
                with error:
                    found = error
            except (URLError, ConnectionError) as error:
                found = error
            else:
                if until(found):
                    return found
            time.sleep(0.2)
        raise AssertionError(f"{address} gave {found!r}\n{output.read_text()[-2000:]}")

    try:
        yield read
    finally:
        server.terminate()
        server.wait(timeout=DEADLINE_S)


@pytest.mark.parametrize("tag", CURVES)
def test_a_curve_has_one_positive_point_an_optimizer_step(get: Get, tag: str) -> None:
    assert tag in get("plugin/scalars/tags", until=lambda runs: tag in runs.get("run", {}))["run"]
    points = get(
        "plugin/scalars/scalars", until=lambda rows: len(rows) >= STEPS, run="run", tag=tag
    )
    assert [step for _, step, _ in points] == list(range(STEPS))
    assert all(value > 0 for _, _, value in points)
    times = [wall_time for wall_time, _, _ in points]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 3600


def test_the_peak_is_at_least_what_is_allocated(get: Get) -> None:
    allocated, peak = (
        [value for _, _, value in get("plugin/scalars/scalars", run="run", tag=tag)]
        for tag in (CURVES[0], CURVES[2])
    )
    assert all(high >= low for low, high in zip(allocated, peak, strict=True))


def test_one_chart_shows_the_three_curves_together(get: Get) -> None:
    layout = get("plugin/custom_scalars/layout")
    charts = [chart for category in layout["category"] for chart in category["chart"]]
    assert set(CURVES) in [set(chart["multiline"]["tag"]) for chart in charts]
    for chart in charts:
        for tag in chart["multiline"]["tag"]:
            found = get("plugin/custom_scalars/scalars", run="run", tag=tag)
            assert len(found["tag_to_events"][tag]) == STEPS
