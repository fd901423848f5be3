"""Memory that really runs out: the card is made small, as `set_per_process_memory_fraction` can."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from lightning_memopt import AutoAccumulation, AutomaticMixedPrecision
from lightning_memopt.core.units import GIB, MIB
from tests.models import Block, Recorder, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*normalise over the batch")
DEVICE = "cuda"
SHARE = 0.9  # of the card, what `memory` is by default
# Weights 1.5 GiB, gradients as much, AdamW's state 3 GiB, activations 6 GiB: 12 GiB for the batch.
LARGE = {"width": 4096, "depth": 24, "batch_size": 8192, "batches": 4}
LARGE_CARD = 10 * GIB
# 96 MiB of weights; 192 KiB a sample are kept for backward, half of it in bf16.
SMALL = {"width": 1024, "depth": 24, "batch_size": 24576, "batches": 2}
SMALL_CARD = 2 * GIB
RECOVERY_CARD, SPENT = 1 * GIB, 48 * MIB  # a sample; 32 of them don't fit, 16 do
RECOVERY_BATCH, FAILS_AT = 32, 4


class Sizes:
    """The samples of all calls of `training_step`; an object of its own is not put back."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Stack(pl.LightningModule):
    """Blocks of a linear layer and GELU, trained by AdamW."""

    def __init__(self, width: int, depth: int, batch_size: int, batches: int) -> None:
        super().__init__()
        self.width, self.batch_size, self.batches = width, batch_size, batches
        with torch.device(DEVICE):  # on a CPU it would take seconds
            blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
            for block in blocks:
                nn.init.normal_(block[0].weight, std=math.sqrt(2 / width))
        self.net = nn.Sequential(*blocks)
        self.sizes = Sizes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch[0]))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batches * self.batch_size, self.width, generator=generator)
        return DataLoader(TensorDataset(x), self.batch_size)


class Images(pl.LightningModule):
    """A convolutional network."""

    def __init__(self, batch_size: int = 3072, batches: int = 2) -> None:
        super().__init__()
        self.net = resnet18(num_classes=10)
        self.batch_size, self.batches = batch_size, batches
        self.sizes = Sizes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        n = self.batches * self.batch_size
        data = TensorDataset(torch.randn(n, 3, 64, 64), torch.randint(10, (n,)))
        return DataLoader(data, self.batch_size)


class Spend(torch.autograd.Function):
    """Takes memory for each sample, for a moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: int, in_backward: int) -> Tensor:
        ctx.in_backward = in_backward
        _take(len(x) * in_forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _take(len(grad) * ctx.in_backward)
        return grad, None, None


def _take(size: int) -> None:
    torch.empty(size, dtype=torch.uint8, device=DEVICE)


class Hungry(pl.LightningModule):
    """Little weights, dropout, and a phase that takes much memory from some batch on."""

    def __init__(
        self, phase: str, spent: int = SPENT, begin: int = FAILS_AT, block: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.spent = {"forward": 0, "backward": 0} | {phase: spent}
        self.begin = begin
        self.stem, self.block, self.head = nn.Linear(4, 8), block or Block(8), nn.Linear(8, 1)
        self.sizes = Sizes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch[0]))
        x, y = batch
        h = self.stem(x)
        if batch_idx >= self.begin:
            h = Spend.apply(h, self.spent["forward"], self.spent["backward"])
        return nn.functional.mse_loss(self.head(self.block(h)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(8 * RECOVERY_BATCH, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), RECOVERY_BATCH)


@dataclass
class Moment:
    """The state of training at the start, on the host."""

    allocated: int
    random: tuple[Tensor, Tensor]
    weights: dict[str, Tensor]
    gradients: int
    optimizer: dict[str, Any]
    scaler: dict[str, Any]


class Snapshot(pl.Callback):
    """Takes a `Moment` as training starts: one before `AutoAccumulation`, one after it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.moment = Moment(
            allocated=torch.cuda.memory_allocated(),
            random=(torch.get_rng_state(), torch.cuda.get_rng_state()),
            weights={name: value.cpu().clone() for name, value in pl_module.state_dict().items()},
            gradients=sum(parameter.grad is not None for parameter in pl_module.parameters()),
            optimizer=trainer.optimizers[0].state_dict(),
            scaler={} if scaler is None else scaler.state_dict(),
        )


class Watch(pl.Callback):
    """What training takes once the size is found."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.step_sizes: list[list[int]] = []
        self.first_gradient: dict[str, Tensor] = {}
        self.keeps_gradient = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.done = len(pl_module.sizes.seen)
        if not self.allocated:
            self.tried = set(pl_module.sizes.seen)
            self.counts = counts()
            torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.keeps_gradient and not self.first_gradient:
            self.first_gradient = {n: p.grad.cpu() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.allocated.append(torch.cuda.memory_allocated())
        self.step_sizes.append(pl_module.sizes.seen[self.done :])

    def on_train_end(self, *_: Any) -> None:
        self.peak = torch.cuda.max_memory_reserved()
        self.new_retries, self.new_ooms = (
            now - before for now, before in zip(counts(), self.counts, strict=True)
        )


class Ask(pl.Callback):
    """What an out-of-memory error would ask for, asked for by hand."""

    def __init__(self, auto: AutoAccumulation, batch_idx: int, size: int) -> None:
        self.auto, self.batch_idx, self.size = auto, batch_idx, size

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch_idx:
            self.auto.set_micro_batch_size(self.size)


@dataclass
class Run:
    """A fit on a small card."""

    model: Any
    auto: AutoAccumulation
    before: Snapshot = field(default_factory=Snapshot)
    after: Snapshot = field(default_factory=Snapshot)
    watch: Watch = field(default_factory=Watch)
    recorder: Recorder = field(default_factory=Recorder)

    def fit(self, *others: pl.Callback, **kwargs: Any) -> Run:
        callbacks = [*others, self.before, self.auto, self.after, self.watch]
        defaults = {"accelerator": "gpu", "logger": self.recorder}
        self.trainer = make_trainer(*callbacks, **(defaults | kwargs))
        self.trainer.fit(self.model)
        return self


def counts() -> tuple[int, int]:
    """Return how often the allocator gave its cache back for want of memory, and how often in vain.

    Both since the process began.
    """
    stats = torch.cuda.memory_stats()
    return stats["num_alloc_retries"], stats["num_ooms"]


def settle() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def small_card(size: int) -> Iterator[None]:
    settle()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        settle()


@pytest.fixture(scope="module", autouse=True)
def _workspaces() -> None:
    """Let cuBLAS allocate what it keeps for good: that is of no test."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            loss = net(torch.ones(64, 64, device=DEVICE)).sum()
        loss.backward()


@pytest.fixture(scope="module")
def large_batch() -> Run:
    """A batch of 12 GiB on a card of 10 GiB, eight steps; all of it is on the host afterwards."""
    with small_card(LARGE_CARD):
        torch.manual_seed(0)
        run = Run(Stack(**LARGE), AutoAccumulation())
        run.watch.keeps_gradient = True
        return run.fit(max_epochs=2)


def test_a_batch_that_does_not_fit_is_trained_whole_in_every_step(large_batch: Run) -> None:
    size, auto = LARGE["batch_size"], large_batch.auto
    assert 2 <= auto.chosen <= auto.largest < size
    parts = math.ceil(size / auto.chosen)
    assert len(large_batch.watch.step_sizes) == large_batch.trainer.global_step == 8
    for sizes in large_batch.watch.step_sizes:
        assert sum(sizes) == size
        assert len(sizes) == parts
        assert max(sizes) <= auto.chosen


def test_memory_never_runs_short_and_stays_within_the_limit(large_batch: Run) -> None:
    watch = large_batch.watch
    assert (watch.new_retries, watch.new_ooms) == (0, 0)
    assert large_batch.recorder.values("accumulation/recoveries") == [0.0]
    assert watch.peak <= SHARE * LARGE_CARD


def test_what_was_tried_is_logged_over_the_samples(large_batch: Run) -> None:
    curve = large_batch.recorder.of("accumulation/search_peak_gib")
    peaks = {size: point["accumulation/search_peak_gib"] * GIB for size, point in curve}
    assert len(peaks) > 1
    assert peaks.keys() <= large_batch.watch.tried
    assert min(peaks.values()) > 0
    assert SHARE**2 * LARGE_CARD < peaks[large_batch.auto.largest] <= SHARE * LARGE_CARD


def test_the_search_leaves_no_trace(large_batch: Run) -> None:
    assert_no_trace(large_batch)


def assert_no_trace(run: Run) -> None:
    before, after = run.before.moment, run.after.moment
    assert len(set(run.model.sizes.seen)) > 1, "nothing was tried"
    assert after.allocated - before.allocated < MIB
    for mine, theirs in zip(after.random, before.random, strict=True):
        assert torch.equal(mine, theirs)
    assert after.weights.keys() == before.weights.keys()
    for name, value in before.weights.items():
        assert torch.equal(after.weights[name], value), name
    assert after.gradients == before.gradients == 0
    assert after.optimizer == before.optimizer
    assert after.optimizer["state"] == {}
    assert after.scaler == before.scaler


@contextmanager
def first_batch(run: Run) -> Iterator[tuple[Stack, Tensor]]:
    """Give the model as it was before the fit and its first batch, on a card of the same size."""
    with small_card(LARGE_CARD):
        model = run.model.to(DEVICE)
        model.load_state_dict(run.before.moment.weights)
        model.zero_grad()
        yield model, next(iter(model.train_dataloader()))[0].to(DEVICE)
        model.zero_grad()
        model.cpu()


def test_the_gradient_is_that_of_a_split_by_hand(large_batch: Run) -> None:
    with first_batch(large_batch) as (model, batch):
        for part in batch.chunk(16):
            (model.training_step([part], 0) * len(part) / len(batch)).backward()
        del batch, part
        expected = {name: p.grad.cpu() for name, p in model.named_parameters()}
    found = large_batch.watch.first_gradient
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * scale)


def test_a_size_a_little_larger_needs_more_than_the_limit(large_batch: Run) -> None:
    size, ran_out = int(1.06 * large_batch.auto.largest) + 1, False
    with first_batch(large_batch) as (model, batch):
        optimizer = model.configure_optimizers()
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(2):
                model.training_step([batch[:size]], 0).backward()
                optimizer.step()
        except torch.OutOfMemoryError:
            ran_out = True
        peak = torch.cuda.max_memory_reserved()
        del batch, optimizer
    assert ran_out or peak > SHARE * LARGE_CARD


def test_without_the_callback_the_batch_runs_out_of_memory() -> None:
    with small_card(LARGE_CARD):
        model = Stack(**(LARGE | {"batches": 2}))  # the first step finds no state of AdamW
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            make_trainer(accelerator="gpu").fit(model)
        del model


def recovery(phase: str, *others: pl.Callback, asked: bool, **kwargs: Any) -> Run:
    """Train with a batch that gets too large, or with smaller parts asked for at that batch."""
    with small_card(RECOVERY_CARD):
        torch.manual_seed(1)
        auto = AutoAccumulation(micro_batch_size=RECOVERY_BATCH)
        ask = [Ask(auto, FAILS_AT, RECOVERY_BATCH // 2)] if asked else []
        run = Run(Hungry(phase), auto).fit(*ask, *others, max_epochs=2, **kwargs)
        run.end = {name: value.cpu() for name, value in run.model.state_dict().items()}
        run.random = torch.get_rng_state(), torch.cuda.get_rng_state()
        del run.model
        return run


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_batch_that_runs_out_of_memory_is_done_again(
    phase: str, precision: str, factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")

    def mixed() -> list[pl.Callback]:
        return [] if precision == "32-true" else [AutomaticMixedPrecision(precision)]

    failed = recovery(phase, *mixed(), asked=False, accumulate_grad_batches=factor)
    assert failed.watch.new_ooms == 1
    assert f"out of memory in {phase}" in caplog.text
    assert "asked for" in caplog.text
    asked = recovery(phase, *mixed(), asked=True, accumulate_grad_batches=factor)
    assert asked.watch.new_ooms == 0

    assert failed.recorder.values("accumulation/recoveries") == [0.0, 1.0]
    assert asked.recorder.values("accumulation/recoveries")[-1] == 0.0
    assert failed.auto.chosen == asked.auto.chosen == RECOVERY_BATCH // 2
    assert failed.trainer.global_step == asked.trainer.global_step == 2 * math.ceil(8 / factor)
    for sizes in failed.watch.step_sizes[FAILS_AT + 1 :]:
        assert sizes == [RECOVERY_BATCH // 2] * 2
    for name, value in asked.end.items():
        torch.testing.assert_close(failed.end[name], value)
    for mine, theirs in zip(failed.random, asked.random, strict=True):
        assert torch.equal(mine, theirs)
    # The batch that failed has left nothing on the card.
    for mine, theirs in zip(failed.watch.allocated, asked.watch.allocated, strict=True):
        assert abs(mine - theirs) < MIB
    assert failed.watch.allocated[-1] < failed.watch.allocated[FAILS_AT - 1] + MIB


def test_activations_that_do_not_fit_are_made_again_in_parts() -> None:
    weights = []
    size: int = SMALL["batch_size"]
    for _ in range(2):
        with small_card(SMALL_CARD):
            torch.manual_seed(0)
            run = Run(Stack(**SMALL), AutoAccumulation(micro_batch_size=size)).fit()
            weights.append({name: value.cpu() for name, value in run.model.state_dict().items()})
            size = run.auto.chosen
            ooms, peak = run.watch.new_ooms, run.watch.peak
            assert run.trainer.global_step == SMALL["batches"]
            del run
        if len(weights) == 1:
            assert ooms >= 1
            assert size < SMALL["batch_size"]
    assert ooms == 0
    assert peak <= SMALL_CARD
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_sample_that_is_too_large_is_told_with_phase_limit_and_help(phase: str) -> None:
    with small_card(RECOVERY_CARD):
        model = Hungry(phase, spent=2 * RECOVERY_CARD, begin=0, block=nn.GELU())
        with pytest.raises(torch.OutOfMemoryError, match="Not even one sample fits") as caught:
            Run(model, AutoAccumulation()).fit()
        text = str(caught.value)
        assert f"the smallest size tried, 1, runs out of memory in {phase}: CUDA out of" in text
        assert "is what this process may use" in text
        assert "`GradientCheckpointing()`" in text
        assert "`AutomaticMixedPrecision()`" in text
        del caught, model


def test_a_sample_above_the_memory_that_was_given_is_told_with_what_it_needs() -> None:
    with small_card(RECOVERY_CARD):
        model = Hungry("forward", spent=3 * RECOVERY_CARD // 8, begin=0, block=nn.GELU())
        auto = AutoAccumulation(memory=RECOVERY_CARD // 4)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"1, needs .* MiB where `memory` allows 256.00 MiB \("
        ) as caught:
            Run(model, auto).fit()
        del caught, model


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_sample_that_gets_too_large_in_training_is_told(phase: str) -> None:
    with small_card(RECOVERY_CARD):
        model = Hungry(phase, spent=2 * RECOVERY_CARD, block=nn.GELU())
        auto = AutoAccumulation(micro_batch_size=4)
        with pytest.raises(torch.OutOfMemoryError, match="one sample at a time already") as caught:
            Run(model, auto).fit()
        assert "`GradientCheckpointing` or `AutomaticMixedPrecision`" in str(caught.value)
        assert model.sizes.seen[-3:] == [4, 2, 1]
        del caught, model


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_trials_leave_no_trace_whatever_the_precision(precision: str) -> None:
    mixed = [] if precision == "32-true" else [AutomaticMixedPrecision(precision)]
    with small_card(RECOVERY_CARD):
        torch.manual_seed(1)
        run = Run(Hungry("backward", begin=0), AutoAccumulation()).fit(*mixed)
        assert_no_trace(run)
        assert 8 <= run.auto.chosen <= run.auto.largest < RECOVERY_BATCH
        assert (run.watch.new_retries, run.watch.new_ooms) == (0, 0)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [Stack, Images])
def test_training_keeps_within_what_the_search_allows(
    kind: Any, precision: str, factor: int
) -> None:
    with small_card(SMALL_CARD):
        model = kind(**SMALL) if kind is Stack else kind()
        run = Run(model, AutoAccumulation())
        run.fit(precision=precision, accumulate_grad_batches=factor, max_epochs=2)
        assert run.auto.chosen < model.batch_size
        assert run.watch.new_retries == 0
        assert run.watch.peak <= SHARE * SMALL_CARD
        assert run.recorder.values("accumulation/recoveries")[-1] == 0
        del run, model


HOLD = """
import sys, torch
left = int(sys.argv[1])
torch.ones(1, device="cuda")
held = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_a_tensor(left: int) -> Iterator[None]:
    held = torch.empty(SMALL_CARD - left, dtype=torch.uint8, device=DEVICE)
    yield
    del held


@contextmanager
def held_by_another_process(left: int) -> Iterator[None]:
    command = [sys.executable, "-c", HOLD, str(left)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield
        process.stdin.close()


@pytest.mark.parametrize("held", [held_by_a_tensor, held_by_another_process])
def test_memory_that_others_hold_lowers_what_is_found(held: Any) -> None:
    found, tries = [], []
    for left in (None, SMALL_CARD // 2):
        with small_card(SMALL_CARD):
            torch.manual_seed(0)
            model = Stack(**SMALL)
            run = Run(model, AutoAccumulation())
            if left is None:
                run.fit()
            else:
                with held(left):
                    run.fit()
            found.append(run.auto.largest)
            tries.append(len(set(model.sizes.seen)))
            assert run.trainer.global_step == SMALL["batches"]
            assert (run.watch.new_retries, run.watch.new_ooms) == (0, 0)
            del run, model
    assert min(tries) > 1
    assert 0 < found[1] < 0.75 * found[0]
