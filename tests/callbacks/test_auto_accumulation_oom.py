"""Memory that really runs out: the address space of a process on a CPU is limited."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("resource", reason="Windows has no limit on the address space")

SCRIPT = """
import json, resource, sys
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_memopt import AutoAccumulation
from tests.models import make_trainer

MIB = 2**20
torch.set_num_threads(1)
arguments = json.loads(sys.argv[1])


class Model(pl.LightningModule):
    '''A sample keeps 80 KiB for backward, a batch of 8192 some 640 MiB.'''

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(40)]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        x = torch.randn(2 * 8192, 256, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), 8192)


def fit(room):
    model = Model()
    loader = model.train_dataloader()
    # A first step makes all threads and libraries be there.
    Model().training_step([torch.ones(4, 256)], 0).backward()
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room * MIB, resource.RLIM_INFINITY))
    auto = AutoAccumulation(**arguments)
    trainer = make_trainer(auto)
    trainer.fit(model, loader)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return auto, trainer, model


if arguments.pop("plain", False):
    arguments["recover"] = False
auto, trainer, model = fit(500)
expected = Model()
optimizer = expected.configure_optimizers()
for batch in expected.train_dataloader():
    optimizer.zero_grad()
    for part in batch[0].chunk(16):
        (expected.training_step([part], 0) / 16).backward()
    optimizer.step()
difference = max(
    ((a - b).abs().max() / b.abs().max()).item()
    for a, b in zip(model.parameters(), expected.parameters())
)
print(json.dumps({
    "chosen": auto.chosen, "largest": auto.largest, "steps": trainer.global_step,
    "difference": difference,
}))
"""


def run(**arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def result(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_the_search_finds_a_size_that_trains() -> None:
    found = result(run())
    assert 8 <= found["chosen"] <= found["largest"] < 8192
    assert found["steps"] == 2
    assert found["difference"] < 1e-4


def test_a_whole_batch_runs_out_of_memory_without_recovery() -> None:
    process = run(micro_batch_size=8192, plain=True)
    assert process.returncode != 0
    assert "can't allocate memory" in process.stderr


def test_a_batch_that_runs_out_of_memory_is_done_again() -> None:
    process = run(micro_batch_size=8192)
    found = result(process)
    assert "out of memory in" in process.stderr
    assert found["chosen"] < 8192
    assert found["steps"] == 2
    assert found["difference"] < 1e-4
