"""The command as users run it: named modules, shapes and data, configurations, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_memopt
from lightning_memopt.__main__ import main

ROOT = Path(lightning_memopt.__file__).parents[1]
MODULES = '''
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

print("a word on stdout")

class Net(LightningModule):
    def __init__(self, width: int = 64, name: str = "net"):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, width), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(width, 10)
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.blocks(x)), y)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Example(LightningModule):
    example_input_array = torch.zeros(3, 8)
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Reads(nn.Module):
    """Reads values in its constructor, so it can't be made on meta."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, int(torch.ones(3).sum().item()))
    def forward(self, x):
        return self.layer(x)

class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        y = self.layer(x)
        return y if y.sum().item() > 0 else -y

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
    def forward(self, tokens, labels):
        return nn.functional.cross_entropy(self.embedding(tokens).mean(1), labels)

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 5, width: int = 64):
        super().__init__()
        self.batch_size, self.width = batch_size, width
    def setup(self, stage):
        self.data = TensorDataset(torch.rand(20, self.width), torch.randint(10, (20,)))
    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

class Raises(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        raise KeyError("no such file")

class Empty(Dataset):
    def __len__(self):
        return 0
    def __getitem__(self, index):
        raise IndexError

data = TensorDataset(torch.rand(20, 64), torch.randint(10, (20,)))
ready = Net(32)

def make(width):
    return Net(width)
'''
NET = ("nets.py:Net", "--input", "64", "--input", ":int64:10")


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def find(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    assert main(["estimate", "--no-advice", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def size_of(found: dict[str, Any], kind: str) -> int:
    """Return the bytes of one use."""
    return sum(part["size_bytes"] for part in found["parts"] if part["kind"] == kind)


def weights(width: int) -> int:
    """Return the bytes of a `Net`."""
    return 4 * (12 * (width * width + width) + width * 10 + 10)


def test_a_process_prints_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_memopt", "estimate", *NET, "--batch-size", "8"]
    done = subprocess.run(
        [*command, "--device", "h200"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "100"},
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.startswith("Net, 8 samples, 32-true, strategy auto\npeak ")
    assert "the largest micro-batch that fits has" in done.stdout
    assert "a word on stdout" in done.stderr
    assert "a word on stdout" not in done.stdout


def test_a_process_says_a_mistake_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memopt", "estimate", "nets.py:Nut", "--input", "64"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "lightning-memopt: 'nets.py' has no 'Nut'."
    assert "Traceback" not in done.stderr


def test_the_figures_are_those_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = find(capsys, *NET, "--batch-size", "16", "--device", "cpu")
    import nets  # what the command has imported

    batch = (torch.rand(16, 64), torch.randint(10, (16,)))
    expected = lightning_memopt.estimate(nets.Net(), batch, device="cpu").as_dict()
    assert {key: found[key] for key in expected} == expected
    assert size_of(found, "parameters") == weights(64)
    assert size_of(found, "optimizer state") == 0  # SGD without momentum, its own


@pytest.mark.parametrize(
    ("args", "width"),
    [
        (("nets.py:Net",), 64),
        (("nets:Net", "--init", "width=32", "--init", "name=other"), 32),
        (("nets.py:make", "--init", "width=16"), 16),
        (("nets.py:ready",), 32),
    ],
)
def test_a_module_is_a_class_a_function_or_an_object(
    args: tuple[str, ...], width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find(capsys, *args, "--input", str(width), "--input", ":int64:10", "--device", "cpu")
    assert size_of(found, "parameters") == weights(width)
    assert found["module"] == "Net"
    assert found["samples"] == 1


@pytest.mark.parametrize(
    ("args", "samples"),
    [
        (("--data", "nets.py:Data"), 5),
        (("--data", "nets.py:Data", "--data-init", "batch_size=7"), 7),
        (("--data", "nets.py:Data", "--batch-size", "12"), 12),
        (("--data", "nets.py:data"), 1),
        (("--data", "nets.py:data", "--batch-size", "50"), 50),
    ],
)
def test_a_batch_comes_from_data(
    args: tuple[str, ...], samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find(capsys, "nets.py:Net", *args)
    assert found["samples"] == samples
    assert size_of(found, "batch") == samples * (64 * 4 + 8)


def test_inputs_may_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--input", "tokens=12:int64:100", "--input", "labels=:int64:8", "--batch-size", "3")
    found = find(capsys, "nets.py:Named", *args)
    assert size_of(found, "batch") == 3 * (12 * 8 + 8)
    assert size_of(found, "optimizer state") >= 2 * 100 * 8 * 4  # AdamW, as it names none


def test_an_example_input_runs_forward_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = find(capsys, "nets.py:Example")
    assert found["samples"] == 3
    assert "example_input_array" in found["notes"][0]
    assert size_of(found, "optimizer state") == 0


def test_a_module_that_reads_values_is_made_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = find(capsys, "nets.py:Reads", "--input", "4", "--batch-size", "2")
    assert not found["is_rough"]
    assert size_of(found, "parameters") == 4 * (4 * 3 + 3)


def test_a_step_that_values_decide_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("estimate", "nets.py:Chooses", "--input", "4", "--batch-size", "8", "--device", "8GiB")
    assert main([*args]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "A rough figure: the step can't be traced" in page
    assert "y.sum().item()" in page
    found = find(capsys, *args[1:])
    assert found["is_rough"]
    assert found["fits"]
    assert found["largest_micro_batch"] is None


def test_options_change_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    plain = find(capsys, *NET, "--batch-size", "512")
    less = find(capsys, *NET, "--batch-size", "512", "--checkpoint", "blocks.*")
    half = find(capsys, *NET, "--batch-size", "512", "--precision", "bf16-true")
    adam = find(capsys, *NET, "--batch-size", "512", "--optimizer", "adam")
    ddp = find(capsys, *NET, "--batch-size", "512", "--strategy", "ddp")
    assert plain["kept_bytes"] - less["kept_bytes"] == 6 * 512 * 64 * 4  # a `Tanh` of each block
    assert size_of(half, "parameters") == weights(64) / 2
    assert size_of(adam, "optimizer state") >= 2 * weights(64)
    assert size_of(ddp, "gradient buckets") == weights(64)


def test_accumulation_keeps_gradients_over_forward(capsys: pytest.CaptureFixture[str]) -> None:
    plain = find(capsys, *NET, "--batch-size", "512")
    args = ("--batch-size", "512", "--accumulate-grad-batches", "4")
    accumulated = find(capsys, *NET, *args)
    assert accumulated["samples"] == 512
    assert accumulated["accumulate_grad_batches"] == 4
    assert accumulated["peak_bytes"] > plain["peak_bytes"]
    assert size_of(accumulated, "gradients") == weights(64)


def test_the_page_ends_in_advice(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("estimate", *NET, "--batch-size", "1024", "--device", "cpu")
    assert main([*args, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice[0]["saved_bytes"] >= advice[-1]["saved_bytes"] > 0
    assert {"what", "saved_bytes", "price", "how"} == set(advice[0])
    assert main([*args]) == 0
    page = capsys.readouterr().out
    assert "what would save most" in page
    assert "checkpoint all 6 blocks" in " ".join(page.split())
    assert main([*args, "--no-advice"]) == 0
    assert "what would save most" not in capsys.readouterr().out


CONFIG = """
fit:
  seed_everything: 3
  model:
    class_path: nets.Net
    init_args: {width: 32}
  data:
    class_path: nets.Data
    init_args: {batch_size: 6, width: 32}
  optimizer:
    class_path: torch.optim.AdamW
    init_args: {lr: 0.1}
  trainer:
    precision: bf16-true
    accumulate_grad_batches: 2
    callbacks:
      - class_path: lightning.pytorch.callbacks.LearningRateMonitor
      - class_path: lightning_memopt.GradientCheckpointing
        init_args: {layers: "blocks.*", skip_last: true, every: 2}
"""


def test_a_lightning_cli_configuration_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    found = find(capsys, "--config", "config.yaml")
    assert found["module"] == "Net"
    assert found["samples"] == 6
    assert found["precision"] == "bf16-true"
    assert found["accumulate_grad_batches"] == 2
    assert found["checkpoint"] == ["blocks.0", "blocks.2", "blocks.4"]
    assert size_of(found, "parameters") == weights(32) / 2
    assert size_of(found, "optimizer state") >= weights(32)


def test_options_win_over_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    args = ("--precision", "32", "--batch-size", "9", "--optimizer", "sgd", "--strategy", "ddp")
    found = find(capsys, "--config", "config.yaml", *args, "--accumulate-grad-batches", "1")
    assert (found["samples"], found["precision"], found["strategy"]) == (9, "32-true", "ddp")
    assert found["accumulate_grad_batches"] == 1
    assert size_of(found, "optimizer state") == 0


def test_callbacks_of_the_suite_set_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("""
model: {width: 16}
trainer:
  callbacks:
    - class_path: lightning_memopt.AutomaticMixedPrecision
    - class_path: lightning_memopt.GradientAccumulation
      init_args: {steps: {0: 2, 4: 8}}
    - lightning_memopt.AutoAccumulation
""")
    inputs = ("--input", "16", "--input", ":int64:10", "--batch-size", "4")
    found = find(capsys, "nets.py:Net", "--config", "config.yaml", *inputs)
    assert found["precision"] == "bf16-mixed"
    assert found["accumulate_grad_batches"] == 8
    assert size_of(found, "parameters") == weights(16)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "A module is needed"),
        (("nets.py",), "must be `package.module:Name`"),
        (("other.py:Net",), "there is no file"),
        (("no_such_package:Net",), "No module named 'no_such_package'"),
        (("nets.py:Net", "--init", "width"), "must be `name=value`"),
        (("nets.py:Net", "--init", "wide=3", "--input", "3"), "unexpected keyword argument 'wide'"),
        (("nets.py:Net",), "A batch is needed"),
        (("nets.py:Net", "--input", "3,4"), "must be the shape of a sample"),
        (("nets.py:Net", "--input", "3:int65"), "must be the shape of a sample"),
        (("nets.py:Net", "--input", "0"), "must be the shape of a sample"),
        (("nets.py:Net", "--input", "a=3", "--input", "4"), "a name of its own"),
        (("nets.py:Net", "--data", "nets.py:Raises"), "KeyError: 'no such file'"),
        (("nets.py:Net", "--data", "nets.py:Empty"), "gives no batch"),
        (("nets.py:data", "--input", "3"), "must be a `torch.nn.Module`"),
        ((*NET, "--precision", "fp8"), "`precision` must be one of"),
        ((*NET, "--optimizer", "Lion"), "`optimizer` must be one of"),
        ((*NET, "--device", "h900"), "`device` must be"),
        ((*NET, "--checkpoint", "layers.*"), "layers.*"),
        (("--config", "missing.yaml"), "can't be read as YAML"),
        (("--config", "nets.py"), "can't be read as YAML"),
        (("--config", "bad.yaml"), "must hold a LightningCLI configuration"),
    ],
)
def test_a_mistake_is_one_line(
    args: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("- 1\n")
    assert main(["estimate", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [each for each in printed.err.splitlines() if each.startswith("lightning-memopt")]
    assert words in line
