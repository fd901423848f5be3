from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt import AutoAccumulation, GradientCheckpointing, MemoryMonitor, OOMReport
from lightning_memopt.core.memory_history import Snapshot
from tests.models import Blocks, FakeOOM, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

ME = str(Path(__file__))
OOM = r"can't allocate memory|not enough memory|out of memory"
TOO_MUCH = 2**62

REAL_FAILURES = """
import gc, json, resource, sys
import lightning.pytorch as pl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_memopt import OOMReport
from tests.models import make_trainer

MIB = 2**20
torch.set_num_threads(1)


class Needy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.ones(800 * MIB, dtype=torch.int8)  # of backward
        return grad


class NeedySGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure()
        torch.ones(800 * MIB, dtype=torch.int8)  # of optimizer
        return loss


class Model(pl.LightningModule):
    def __init__(self, phase):
        super().__init__()
        self.phase = phase
        self.kept = []
        self.stem = nn.Linear(256, 256)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU())] * 40)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        if self.phase == "growth":
            self.kept.append(torch.ones(6 * MIB, dtype=torch.int8))
        if self.phase == "forward" and batch_idx == 2:
            x = x.repeat(1000, 1)
        x = self.blocks(self.stem(x))  # of forward
        return (Needy.apply(x) if self.phase == "backward" and batch_idx == 2 else x).sum()

    def validation_step(self, batch, batch_idx):
        if self.phase == "validation":
            kept = [torch.ones(100 * MIB, dtype=torch.int8) for _ in range(8)]  # of validation

    def configure_optimizers(self):
        optimizer = NeedySGD if self.phase == "optimizer step" else torch.optim.SGD
        return optimizer(self.parameters(), lr=0.1)


data = DataLoader(TensorDataset(torch.randn(32, 256)), 8)
long = DataLoader(TensorDataset(torch.randn(800, 256)), 8)
make_trainer().fit(Model(""), data)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 500 * MIB, resource.RLIM_INFINITY))
errors = {}
for phase in ("forward", "backward", "optimizer step", "validation", "growth"):
    gc.collect()
    trainer = make_trainer(OOMReport(phase), num_sanity_val_steps=0)
    try:
        trainer.fit(Model(phase), long if phase == "growth" else data, data)
    except RuntimeError as error:
        errors[phase] = str(error)
print(json.dumps(errors))
"""


class Failing(Blocks):
    """Asks for more than there is in one phase of its third batch."""

    def __init__(self, phase: str = "forward", at: int = 2) -> None:
        super().__init__()
        self.phase, self.at = phase, at

    def ask(self, phase: str, batch_idx: int) -> None:
        if self.phase == phase and batch_idx == self.at:
            torch.empty(TOO_MUCH, dtype=torch.int8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.held = weakref.ref(local := torch.ones(3))
        loss = super().training_step(batch, batch_idx) * local.mean()
        self.ask("forward", batch_idx)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.ask("validation", batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.ask("test", batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.ask("predict", batch_idx)
        return batch[0]


def fail(
    model: pl.LightningModule, *callbacks: pl.Callback, run: str = "fit", **kwargs: Any
) -> Any:
    trainer = make_trainer(*callbacks, **kwargs)
    with pytest.raises((RuntimeError, MemoryError), match=OOM) as caught:
        getattr(trainer, run)(model)
    return caught


def written(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir()) if directory.exists() else []


def report_of(directory: Path) -> str:
    (file,) = directory.glob("*.txt")
    return file.read_text(encoding="utf-8")


def row(report: str, name: str) -> str:
    """Return what a line of the report says after its name."""
    (found,) = re.findall(rf"^{name} +(.*)$", report, re.MULTILINE)
    return found


def last_step(report: str) -> int:
    """Return the last of the steps that are shown."""
    return int(re.findall(r"of the last \d+ steps, \d+ to (\d+)", report)[0])


# Memory that really runs out


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("resource", reason="Windows has no limit on the address space")
    directory = tmp_path_factory.mktemp("reports")
    root = str(Path(__file__).parents[2])
    (directory / "program.py").write_text(REAL_FAILURES)
    result = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=directory,
        env={"PYTHONPATH": root, "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(directory)},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    errors = json.loads(result.stdout.splitlines()[-1])
    assert all(re.search(OOM, error) for error in errors.values())
    return {phase: report_of(directory / phase) for phase in errors}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step", "validation"])
def test_memory_that_really_runs_out_is_explained_in_each_phase(
    reports: dict[str, str], phase: str
) -> None:
    report = reports[phase]
    assert row(report, "phase") == phase
    assert row(report, "asked for").endswith("MiB")
    assert f"# of {phase.split()[0]}" in row(report, "your line")
    assert re.search(r"^ +[\d.]+ KiB  parameters$", report, re.MULTILINE)
    assert "is the most that this process may use" in report


def test_activations_of_a_real_failure_are_told_by_module(reports: dict[str, str]) -> None:
    # 8000 rows of 256 floats at a time: the stem keeps its input, each block two.
    assert re.search(r"[\d.]+ MiB  activations\n +[\d.]+ MiB  blocks", reports["forward"])
    assert "7.81 MiB  stem" in reports["forward"]
    assert "`AutoAccumulation()`: a batch in " in reports["forward"]
    assert row(reports["forward"], "module").startswith("blocks.")


def test_memory_that_really_grew_until_it_ran_out_is_told_from_the_rest(
    reports: dict[str, str],
) -> None:
    report = reports["growth"]
    kind, _, reason = row(report, "likely kind").partition(": ")
    assert kind == "growth over time"
    added, rate = re.findall(r"([\d.]+) MiB", reason)
    assert float(added) == pytest.approx(6 * last_step(report), rel=0.05)
    assert float(rate) == pytest.approx(600, rel=0.05)
    assert re.search(r" MiB  in `model.kept`, list of \d+, 0 with a graph", report)
    assert "1. free what grows" in report


def test_a_real_failure_tells_of_the_steps_before_it(reports: dict[str, str]) -> None:
    assert "Resident memory after each of the last 2 steps, 0 to 1" in reports["forward"]
    assert "This batch: [8, 256] float32\nUsual ones: [8, 256] float32" in reports["forward"]


# What the page says


@pytest.mark.parametrize(
    ("run", "phase"),
    [
        ("fit", "forward"),
        ("fit", "validation"),
        ("validate", "validation"),
        ("test", "test"),
        ("predict", "predict"),
    ],
)
def test_every_run_of_a_trainer_is_explained(run: str, phase: str, tmp_path: Path) -> None:
    fail(Failing(phase), OOMReport(tmp_path), run=run, num_sanity_val_steps=0)
    report = report_of(tmp_path)
    assert row(report, "phase") == phase
    assert row(report, "asked for") == "4194304.00 TiB"
    assert row(report, "your line").startswith(f"{Path(ME).relative_to(Path.cwd())}:")
    assert row(report, "your line").endswith("torch.empty(TOO_MUCH, dtype=torch.int8)")
    assert row(report, "likely kind").startswith("single request larger than the device")


def test_the_file_names_rank_and_step_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for _ in range(3):
        fail(Failing(), OOMReport(tmp_path))
    assert written(tmp_path) == [
        "oom-rank0-step2-2.txt",
        "oom-rank0-step2-3.txt",
        "oom-rank0-step2.txt",
    ]
    assert "at step 2, epoch 0, on rank 0 of 1" in (tmp_path / "oom-rank0-step2.txt").read_text()


def test_the_parts_of_the_device_add_up_to_it(tmp_path: Path) -> None:
    fail(Failing(), OOMReport(tmp_path))
    section = report_of(tmp_path).split("The device, ")[1].split("\n\n")[0].splitlines()
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

    def size(text: str) -> float:
        number, unit = text.split()[:2]
        return float(number) * units[unit]

    names = [" ".join(line.split()[2:]) for line in section[1:4]]
    assert names == ["this process (resident)", "other processes", "free"]
    parts = sum(size(line) for line in section[1:4])
    assert parts == pytest.approx(size(section[0]), rel=0.01)


def test_an_unusually_large_batch_is_shown_beside_the_usual_ones(tmp_path: Path) -> None:
    class Uneven(FakeOOM):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([[torch.ones(n, 4)] for n in (4, 5, 4, 4, 40)], batch_size=None)  # type: ignore[arg-type]

    fail(Uneven(limit=8), OOMReport(tmp_path))
    report = report_of(tmp_path)
    assert row(report, "likely kind") == (
        "an unusually large batch: it has 160 elements, the median before it 16"
    )
    assert "This batch: [40, 4] float32\nUsual ones: [4, 4] float32" in report


def test_only_the_last_fifty_steps_are_shown(tmp_path: Path) -> None:
    fail(Failing(at=2), OOMReport(tmp_path / "short"))
    model = Failing(at=59)
    model.n = 4 * 64
    fail(model, OOMReport(tmp_path / "long"))
    assert "last 2 steps, 0 to 1" in report_of(tmp_path / "short")
    assert "last 50 steps, 9 to 58" in report_of(tmp_path / "long")


def test_what_is_in_use_is_not_advised(tmp_path: Path) -> None:
    fail(Failing(), OOMReport(tmp_path / "without"))
    advised = report_of(tmp_path / "without").split("What to do")[1]
    for name in ("AutomaticMixedPrecision()", "AutoAccumulation()", "GradientCheckpointing()"):
        assert name in advised
    others = [GradientCheckpointing(), AutoAccumulation(micro_batch_size=4, recover=False)]
    fail(Failing(), OOMReport(tmp_path / "with"), *others, precision="bf16-mixed")
    assert "No callback of the suite" in report_of(tmp_path / "with")


def test_a_search_that_finds_nothing_that_fits_is_explained(tmp_path: Path) -> None:
    trainer = make_trainer(AutoAccumulation(), OOMReport(tmp_path))
    with pytest.raises(torch.OutOfMemoryError, match="one sample"):
        trainer.fit(FakeOOM(limit=0))
    assert "Out of memory at step 0" in report_of(tmp_path)


# Where it goes


def test_without_a_logger_it_goes_to_the_trainers_directory(tmp_path: Path) -> None:
    fail(Failing(), OOMReport(), default_root_dir=tmp_path)
    assert written(tmp_path / "oom") == ["oom-rank0-step2.txt"]


def test_it_is_beside_the_curves_and_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fail(Failing(), OOMReport(), logger=logger)
    report = report_of(Path(logger.log_dir) / "oom")
    accumulator = EventAccumulator(logger.log_dir)
    accumulator.Reload()
    (event,) = accumulator.Tensors("oom/report/text_summary")
    (shown,) = event.tensor_proto.string_val
    assert shown.decode().replace("    ", "").split() == report.replace("    ", "").split()
    assert event.step == 2


def test_it_says_where_it_would_go_and_where_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fail(Failing(), OOMReport(tmp_path))
    assert f"OOMReport: no record of allocations on cpu; a report would go to {tmp_path}" in (
        caplog.text
    )
    assert f"OOMReport: {tmp_path}/oom-rank0-step2.txt says what ran out of memory" in (
        capsys.readouterr().out
    )


def test_a_snapshot_is_saved_beside_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has none: `tests/gpu/test_oom_report_gpu.py` has a real one.
    snapshot: Snapshot = {"segments": [], "device_traces": [[]]}
    monkeypatch.setattr(
        "lightning_memopt.callbacks.oom_report.take_snapshot", lambda device: snapshot
    )
    fail(Failing(), OOMReport(tmp_path))
    fail(Failing(), OOMReport(tmp_path))
    assert "oom-rank0-step2-2.pickle" in written(tmp_path)
    assert "oom-rank0-step2.pickle has the allocator's record" in (
        (tmp_path / "oom-rank0-step2.txt").read_text()
    )


def fit_and_fail(rank: int) -> str:
    """Both ranks run out of memory, in a step before gradients are synchronised."""
    trainer = make_rank_trainer(OOMReport("oom"))
    with pytest.raises(RuntimeError, match=OOM):
        trainer.fit(Failing(at=0))
    return report_of_rank(rank)


def report_of_rank(rank: int) -> str:
    return Path(f"oom/oom-rank{rank}-step0.txt").read_text()


def test_every_rank_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports = run_two_ranks(fit_and_fail, tmp_path)
    assert written(tmp_path / "oom") == ["oom-rank0-step0.txt", "oom-rank1-step0.txt"]
    for rank in (0, 1):
        assert f"on rank {rank} of 2" in reports[rank]


# What it leaves alone


def test_the_error_reaches_the_user_unchanged(tmp_path: Path) -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    class Raising(Failing):
        def ask(self, phase: str, batch_idx: int) -> None:
            if batch_idx == 2:
                raise error

    model = Raising()
    trainer = make_trainer(
        OOMReport(tmp_path), MemoryMonitor(verbose=False), GradientCheckpointing()
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(model)
    assert caught.value is error
    assert str(error) == "CUDA out of memory. Tried to allocate 1.00 GiB."
    assert [entry.name for entry in caught.traceback[-2:]] == ["training_step", "ask"]
    assert "asked for    1.00 GiB" in report_of(tmp_path)


def test_no_frame_of_the_failure_is_kept_alive(tmp_path: Path) -> None:
    model = Failing()
    callbacks = OOMReport(tmp_path), MemoryMonitor(verbose=False), GradientCheckpointing()
    gc.disable()  # what waits for it still holds memory
    try:
        with suppress(RuntimeError):
            make_trainer(*callbacks).fit(model)
        assert model.held() is None
    finally:
        gc.enable()
    assert len(written(tmp_path)) == 1


@pytest.mark.parametrize("error", [ValueError("CUDA out of memory"), KeyboardInterrupt()], ids=repr)
def test_other_errors_are_not_reported(error: BaseException, tmp_path: Path) -> None:
    class Raising(Failing):
        def ask(self, phase: str, batch_idx: int) -> None:
            raise error

    with pytest.raises((ValueError, SystemExit)):
        make_trainer(OOMReport(tmp_path)).fit(Raising())
    assert written(tmp_path) == []


def test_a_page_that_has_no_place_is_shown_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    fail(Failing(), OOMReport(tmp_path / "file"))
    shown = capsys.readouterr().err
    assert "likely kind  single request larger than the device" in shown
    assert "OOMReport: not in a file: " in shown


def test_a_report_that_fails_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise LookupError("of the report")

    monkeypatch.setattr("lightning_memopt.callbacks.oom_report.find_out", broken)
    callback = OOMReport(tmp_path)
    fail(Failing(), callback)
    assert "OOMReport of rank 0 could not be written: LookupError('of the report')" in (
        capsys.readouterr().err
    )
    assert "undo" not in vars(callback)


class UnreadableError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_be_read_reaches_the_user_too(tmp_path: Path) -> None:
    class Raising(Failing):
        def ask(self, phase: str, batch_idx: int) -> None:
            raise UnreadableError

    callback = OOMReport(tmp_path)
    with pytest.raises(UnreadableError):
        make_trainer(callback).fit(Raising())
    assert "undo" not in vars(callback)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize("what", ["lazy", "nested", "view", "class", "self", "compiled"])
def test_odd_things_that_are_alive_cost_no_more_than_their_own_part(
    what: str, tmp_path: Path
) -> None:
    kept = ODD_THINGS[what]()
    fail(Odd(kept), OOMReport(tmp_path))
    report = report_of(tmp_path)
    assert row(report, "phase") == "forward"
    assert "1.22 KiB  parameters" in report
    assert "Not found out" not in report


class Odd(Failing):
    """Has something odd in the frame that fails."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        object.__setattr__(self, "kept", kept)

    def ask(self, phase: str, batch_idx: int) -> None:
        if batch_idx == self.at:
            step(self.kept)


def step(self: Any) -> None:
    torch.empty(TOO_MUCH, dtype=torch.int8)


class Refusing(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise LookupError("a class that has its own mind")


class Masked:
    @property
    def __class__(self) -> Any:
        raise LookupError("a proxy")


def odd_view() -> Any:
    a, b = (torch.ones(2, 3, requires_grad=True) * 1).unbind()
    with torch.no_grad():
        a.mul_(2)
    return a, b


def compiled() -> Any:
    layer = torch.compile(nn.Linear(3, 3), backend="aot_eager")
    return layer, layer(torch.ones(2, 3))


ODD_THINGS: dict[str, Any] = {
    "lazy": lambda: nn.LazyLinear(3),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "view": odd_view,
    "class": lambda: torch.ones(3).as_subclass(Refusing),
    "self": Masked,
    "compiled": compiled,
}


def test_a_batch_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    @dataclass
    class Half:
        x: Tensor
        y: Tensor = field(init=False)  # never set

    class Halves(FakeOOM):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([[torch.ones(4, 4)]] * 3, batch_size=None)  # type: ignore[arg-type]

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return Half(batch[0])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch.x], batch_idx)

    model = Halves()
    make_trainer(OOMReport(tmp_path)).fit(model)
    assert len(model.seen) == 3


def test_a_batch_that_does_not_reach_the_device_is_the_one_that_is_shown(tmp_path: Path) -> None:
    class Moving(FakeOOM):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([[torch.ones(n, 4)] for n in (4, 4, 4000)], batch_size=None)  # type: ignore[arg-type]

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            if len(batch[0]) == 4000:
                torch.empty(TOO_MUCH, dtype=torch.int8)
            return batch

    fail(Moving(), OOMReport(tmp_path))
    report = report_of(tmp_path)
    assert row(report, "phase") == "moving the batch to the device"
    assert "This batch: [4000, 4] float32\nUsual ones: [4, 4] float32" in report


def test_with_several_optimizers_steps_are_counted_as_in_the_curves(tmp_path: Path) -> None:
    class Two(Failing):
        def __init__(self) -> None:
            super().__init__(at=3)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            loss = Blocks.training_step(self, batch, batch_idx)
            self.ask("forward", batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.stem, self.head)]

    fail(Two(), OOMReport(tmp_path))
    assert written(tmp_path) == ["oom-rank0-step6.txt"]
    report = report_of(tmp_path)
    assert "at step 3 (6 of all optimizers), epoch 0" in report
    assert "last 3 steps, 0 to 2" in report


def test_a_run_goes_on_as_without_it_after_a_failure(tmp_path: Path) -> None:
    def losses(*callbacks: pl.Callback) -> list[Tensor]:
        torch.manual_seed(0)
        model = Failing()
        if callbacks:
            fail(model, *callbacks)
            torch.manual_seed(0)
            model.load_state_dict(Failing().state_dict())
        model.at = -1
        torch.manual_seed(1)
        make_trainer(*callbacks).fit(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    with_it, without = losses(OOMReport(tmp_path)), losses()
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dirpath": 3}, TypeError, "`dirpath` must be a path or `None`, got 3"),
        ({"dirpath": ""}, ValueError, "`dirpath` must be a path on this machine or `None`, got ''"),
        ({"max_entries": 0}, ValueError, "`max_entries` must be at least 1"),
        ({"max_entries": "many"}, TypeError, "`max_entries` must be an `int`"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        OOMReport(**arguments)


def test_a_second_report_is_refused() -> None:
    with pytest.raises(Exception, match="both want the report of out-of-memory errors"):
        make_trainer(OOMReport(), OOMReport()).fit(Blocks())


def test_modules_of_a_model_are_told_by_their_names(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty(TOO_MUCH, dtype=torch.int8)

    model = Blocks()
    model.blocks[1].dropout = Inner()
    fail(model, OOMReport(tmp_path))
    assert row(report_of(tmp_path), "module") == "blocks.1.dropout"
