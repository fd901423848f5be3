from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_memopt.core.lone_profiler import LoneProfiler, is_profiler_running

pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")


def make(**kwargs: Any) -> profile:
    return profile(activities=[ProfilerActivity.CPU], **kwargs)


def add_up() -> None:
    torch.ones(3).sum()


def test_alone_it_runs_from_start_to_end():
    lone = LoneProfiler(profiler := make())
    lone.start()
    add_up()
    assert is_profiler_running()
    lone.stop()
    lone.stop()
    assert lone.is_whole
    assert not is_profiler_running()
    assert any(event.key == "aten::sum" for event in profiler.key_averages())


@pytest.mark.parametrize("wait", [0, 1])
def test_beside_one_that_runs_or_waits_for_its_turn_it_does_not_start(wait: int):
    users = make(schedule=schedule(wait=wait, warmup=0, active=1, repeat=1))
    users.start()
    lone = LoneProfiler(make())
    lone.start()
    assert is_profiler_running() is (wait == 0)
    users.step()
    add_up()
    lone.stop()
    users.step()
    users.stop()
    assert not lone.is_whole
    assert not is_profiler_running()


def test_one_that_has_ended_is_not_in_its_way():
    users = make(schedule=schedule(wait=0, warmup=0, active=1, repeat=1))
    for each in (users, make()):
        each.start()
        each.stop()
    lone = LoneProfiler(make())
    lone.start()
    lone.stop()
    assert lone.is_whole


@pytest.mark.parametrize("is_running", [False, True])
def test_one_that_starts_later_keeps_its_session_and_its_events(is_running: bool):
    lone = LoneProfiler(make())
    lone.start()
    with make() as users:
        add_up()
        if is_running:
            lone.stop()
        add_up()
    lone.stop()
    assert not lone.is_whole
    (found,) = (event for event in users.key_averages() if event.key == "aten::sum")
    assert found.count == 2
    # The one that was cut short is not taken for one that runs.
    again = LoneProfiler(make())
    again.start()
    again.stop()
    assert again.is_whole


def test_events_are_freed_without_the_collector():
    profiler = make()
    lone = LoneProfiler(profiler)
    lone.start()
    torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).sum()
    lone.stop()
    reference = weakref.ref(profiler.events()[0])
    gc.disable()
    try:
        lone.forget()
        del profiler, lone
        assert reference() is None
    finally:
        gc.enable()


SCRIPT = """
import sys, torch, lightning.pytorch as pl
from torch.profiler import profile, schedule, ProfilerActivity
from lightning_memopt import MemoryProfiler
from tests.models import Blocks, make_trainer

CPU = [ProfilerActivity.CPU]

class Scheduled(pl.Callback):
    def on_train_start(self, *_):
        done = lambda p: print("users", len(p.key_averages()) > 3)
        plan = schedule(wait=1, warmup=1, active=1, repeat=1)
        self.own = profile(activities=CPU, schedule=plan, on_trace_ready=done)
        self.own.start()
    def on_train_batch_end(self, *_):
        self.own.step()
    def on_train_end(self, *_):
        self.own.stop()

class Inside(pl.Callback):
    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 1:
            with profile(activities=CPU) as own:
                torch.ones(3).sum()
            print("users", len(own.key_averages()) > 1)

for users in (Scheduled, Inside):
    for order in (1, -1):
        callbacks = [users(), MemoryProfiler(steps=[1], dirpath=sys.argv[1])]
        make_trainer(*callbacks[::order]).fit(Blocks())
"""


def test_profiles_beside_the_users_own_end_well(tmp_path: Path):
    ended = subprocess.run(  # of its own: a result that is not there ends the process
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("users True") == 4
    assert (ended.stderr + ended.stdout).count("another PyTorch profiler was running") == 4
    assert len(list(tmp_path.iterdir())) == len(list(tmp_path.glob("*-modules.txt"))) == 4
