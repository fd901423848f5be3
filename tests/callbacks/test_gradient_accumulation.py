from __future__ import annotations

import logging
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_memopt.callbacks._lightning import logged_step
from lightning_memopt.callbacks.automatic_mixed_precision import AutomaticMixedPrecision
from lightning_memopt.callbacks.gradient_accumulation import GradientAccumulation
from tests.models import Blocks, Unit, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

# What goes before the accumulation in the list of callbacks, and what goes to the Trainer.
PRECISIONS = {
    "fp32": lambda: ([], {}),
    "bf16-callback": lambda: ([AutomaticMixedPrecision("bf16-mixed")], {}),
    "bf16-trainer": lambda: ([], {"precision": "bf16-mixed"}),
    "fp16-callback": lambda: ([AutomaticMixedPrecision("16-mixed")], {}),
    "fp16-plugin": lambda: ([], {"plugins": [MixedPrecision("16-mixed", "cpu")]}),
}
STOCK_PRECISIONS = {
    "fp32": dict,
    "bf16-callback": lambda: {"precision": "bf16-mixed"},
    "bf16-trainer": lambda: {"precision": "bf16-mixed"},
    "fp16-callback": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    "fp16-plugin": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
}
in_every_precision = pytest.mark.parametrize("precision", PRECISIONS)
resumed = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
resumes_inside_an_epoch = pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that")


class Stream(IterableDataset):
    """A data set without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


class UnsizedUnit(Unit):
    def train_dataloader(self):
        return DataLoader(Stream([torch.ones(1)] * self.n), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)


class Regression(pl.LightningModule):
    """Least squares on a list of batches, taken as they are; `grads` has one for each step.

    It computes in full precision always: a rounded micro-batch has another gradient than its rows
    have in the big batch, and fp16 would overflow.
    """

    def __init__(self, batches: list[Any], lr: float = 0.0) -> None:
        super().__init__()
        self.batches, self.lr = batches, lr
        self.w = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.grads: list[Tensor] = []

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    def loss(self, batch: Any) -> Tensor:
        return self.losses(batch).mean()

    def losses(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ self.w - 1).square()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(self.w.grad.clone())

    def configure_optimizers(self):
        return torch.optim.SGD([self.w], lr=self.lr)


def random_batches(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 2, generator=generator) for size in sizes]


def gradient_of_one_batch(*batches: Tensor) -> Tensor:
    model = Regression([])
    return torch.autograd.grad(model.loss(torch.cat(batches)), model.w)[0]


class Factors(pl.Callback):
    """Keeps the factor in force in every batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(trainer.accumulate_grad_batches)


class At(pl.Callback):
    """Does something once: in `hook`, at a batch of the first epoch that is run."""

    def __init__(self, batch_idx: int, action, hook: str = "on_train_batch_end") -> None:
        self.batch_idx, self.action, self.hook = batch_idx, action, hook
        self.done = False

    def act(self, hook: str, trainer: pl.Trainer, batch_idx: int) -> None:
        if hook == self.hook and batch_idx == self.batch_idx and not self.done:
            self.done = True
            self.action(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.act("on_train_batch_start", trainer, batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.act("on_train_batch_end", trainer, batch_idx)


def ask(accumulation: GradientAccumulation, steps: int, batch_idx: int, hook: str) -> At:
    return At(batch_idx, lambda trainer: accumulation.set_steps(steps), hook)


def save(path: Path, batch_idx: int) -> At:
    return At(batch_idx, lambda trainer: trainer.save_checkpoint(path))


@pytest.fixture
def lines(caplog):
    """The lines that Lightning's loggers showed so far."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return lambda: [record.getMessage() for record in caplog.records]


def fit_and_keep_warnings(trainer: pl.Trainer, model: pl.LightningModule) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    return [str(warning.message) for warning in caught]


# A window's length


@pytest.mark.parametrize("unit", [Unit, UnsizedUnit])
@in_every_precision
def test_a_short_last_window_has_the_gradient_of_its_own_batches(precision, unit):
    callbacks, kwargs = PRECISIONS[precision]()
    model = unit(n=10)
    make_trainer(*callbacks, GradientAccumulation(4), **kwargs).fit(model)
    assert model.grads == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*3 < 8")
@pytest.mark.parametrize("unit", [Unit, UnsizedUnit])
@in_every_precision
def test_an_epoch_shorter_than_the_factor_has_the_gradient_of_its_own_batches(precision, unit):
    callbacks, kwargs = PRECISIONS[precision]()
    model = unit(n=3)
    trainer = make_trainer(*callbacks, GradientAccumulation(8), max_epochs=4, **kwargs)
    trainer.fit(model)
    assert trainer.global_step == 4
    assert model.grads == pytest.approx([1] * 4, rel=1e-6)


def test_an_epoch_shorter_than_the_factor_is_warned_of_once():
    trainer = make_trainer(GradientAccumulation(8), max_epochs=4)
    messages = fit_and_keep_warnings(trainer, Unit(n=3))
    assert trainer.current_epoch == 4
    assert len([message for message in messages if "3 < 8" in message]) == 1


def test_an_epoch_as_long_as_the_factor_is_not_warned_of():
    model = Unit(n=8)
    messages = fit_and_keep_warnings(make_trainer(GradientAccumulation(8)), model)
    assert model.grads == [1]
    assert not [message for message in messages if re.search(r"\d < \d|steps", message)]


@pytest.mark.parametrize("unit", [Unit, UnsizedUnit])
def test_an_epoch_cut_by_the_trainer_ends_with_a_short_window(unit):
    model = unit(n=10)
    make_trainer(GradientAccumulation(4), limit_train_batches=7, max_epochs=2).fit(model)
    assert model.grads == pytest.approx([1] * 4, rel=1e-6)


def test_batches_before_a_skipped_rest_of_the_epoch_do_not_count_in_the_next():
    class Skips(Unit):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 6 else None

    model = Skips(n=12)
    make_trainer(GradientAccumulation(4), max_epochs=3).fit(model)
    assert model.grads == [1, 1, 1]


def test_validation_inside_a_window_changes_nothing():
    class Validated(Unit):
        validated = 0

        def val_dataloader(self):
            return self.train_dataloader()

        def validation_step(self, batch, batch_idx):
            self.validated += 1

    model = Validated(n=10)
    make_trainer(GradientAccumulation(4), val_check_interval=3).fit(model)
    assert model.validated >= 30
    assert model.grads == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("skipped", [{0}, {1}, {3}, {8}, {0, 1, 2}, {4, 8}])
def test_a_batch_without_a_loss_does_not_count(skipped):
    class Skips(Unit):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    model = Skips(n=10)
    make_trainer(GradientAccumulation(4)).fit(model)
    assert model.grads == pytest.approx([1, 1, 1], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_window_without_any_loss_leaves_the_next_window_right():
    class Skips(Regression):
        def training_step(self, batch, batch_idx):
            return None if batch_idx < 2 else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            if self.w.grad is not None:
                super().on_before_optimizer_step(optimizer)

    batches = random_batches(1, 4, 2, 3)
    model = Skips(batches)
    make_trainer(GradientAccumulation(2)).fit(model)
    assert len(model.grads) == 1
    torch.testing.assert_close(model.grads[0], gradient_of_one_batch(*batches[2:]))


# Unequal micro-batches


@in_every_precision
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (3, 1, 2, 7), (1, 4, 2, 3, 5)])
def test_unequal_batches_have_the_gradient_of_the_one_big_batch(sizes, precision):
    callbacks, kwargs = PRECISIONS[precision]()
    batches = random_batches(*sizes)
    model = Regression(batches)
    make_trainer(*callbacks, GradientAccumulation(2), **kwargs).fit(model)
    expected = [gradient_of_one_batch(*batches[i : i + 2]) for i in range(0, len(sizes), 2)]
    assert len(model.grads) == len(expected)
    for got, want in zip(model.grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_where_floats_allow_it_unequal_batches_are_exact():
    # Three samples with the gradient 1 and one with 9: (3 * 1 + 9) / 4 = 3, not (1 + 9) / 2 = 5.
    class Mean(Regression):
        def loss(self, batch):
            return (batch @ self.w).mean()

    model = Mean([torch.ones(3, 2), torch.full((1, 2), 9.0)] * 2)
    make_trainer(GradientAccumulation(2)).fit(model)
    assert [grad.tolist() for grad in model.grads] == [[3, 3], [3, 3]]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"x": x, "y": torch.zeros(len(x))},
        lambda x: [x, torch.zeros(len(x), 3, 3)],
        lambda x: {"inputs": {"x": x}, "name": "a text"},
    ],
    ids=["dict", "list", "nested"],
)
def test_samples_are_counted_in_any_usual_batch(wrap):
    class Unwraps(Regression):
        def loss(self, batch):
            if isinstance(batch, list):
                return super().loss(batch[0])
            while isinstance(batch, dict):
                batch = batch.get("x", batch.get("inputs"))
            return super().loss(batch)

    batches = random_batches(1, 4)
    model = Unwraps([wrap(batch) for batch in batches])
    make_trainer(GradientAccumulation(2)).fit(model)
    assert len(model.grads) == 1
    torch.testing.assert_close(model.grads[0], gradient_of_one_batch(*batches))


@in_every_precision
@pytest.mark.parametrize("steps", [2, 3])
def test_weighing_by_batches_is_lightnings_own_way(steps, precision):
    batches = random_batches(1, 4, 2, 3, 5, 1)
    ours, stock = Regression(batches, lr=0.1), Regression(batches, lr=0.1)
    callbacks, kwargs = PRECISIONS[precision]()
    make_trainer(*callbacks, GradientAccumulation(steps, weigh_by="batches"), **kwargs).fit(ours)
    make_trainer(accumulate_grad_batches=steps, **STOCK_PRECISIONS[precision]()).fit(stock)
    assert len(ours.grads) == 6 // steps
    assert torch.equal(torch.stack(ours.grads), torch.stack(stock.grads))
    assert torch.equal(ours.w, stock.w)
    assert not torch.equal(ours.w, Regression([]).w)


@in_every_precision
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_full_windows_of_equal_batches_are_bit_equal_to_lightnings(steps, precision):
    def weights(*callbacks, **kwargs):
        torch.manual_seed(0)
        model = Blocks()
        trainer = make_trainer(*callbacks, max_epochs=2, limit_val_batches=0, **kwargs)
        trainer.fit(model)
        assert trainer.global_step == 12 // steps
        return model.state_dict()

    callbacks, kwargs = PRECISIONS[precision]()
    ours = weights(*callbacks, GradientAccumulation(steps), **kwargs)
    stock = weights(accumulate_grad_batches=steps, **STOCK_PRECISIONS[precision]())
    assert all(torch.equal(ours[key], stock[key]) for key in stock)


def count_tokens(batch: dict[str, Tensor]) -> Tensor:
    """The number of tokens that count; the tests name it by its dotted path."""
    return batch["counts"].sum()


class Tokens(Regression):
    """The loss is the mean over the tokens that count, zero where none does."""

    def loss(self, batch):
        losses = self.losses(batch["x"])
        return (losses * batch["counts"]).sum() / batch["counts"].sum().clamp(min=1)


def token_batches(*counts: int) -> list[dict[str, Tensor]]:
    return [
        {"x": x, "counts": (torch.arange(6) < count).float()}
        for x, count in zip(random_batches(*[6] * len(counts)), counts, strict=True)
    ]


@pytest.mark.parametrize(
    "weigh_by",
    [
        count_tokens,
        f"{__name__}.count_tokens",
        lambda batch: count_tokens(batch).item(),
        lambda batch: int(count_tokens(batch)),
    ],
    ids=["function", "dotted name", "float", "int"],
)
@pytest.mark.parametrize("counts", [(1, 6), (5, 2, 4), (0, 3, 6), (3, 0, 6), (3, 6, 0)])
def test_tokens_weigh_batches_whatever_gives_their_number(counts, weigh_by):
    batches = token_batches(*counts)
    model = Tokens(batches)
    make_trainer(GradientAccumulation(len(counts), weigh_by=weigh_by)).fit(model)
    counted = [batch["x"][:count] for batch, count in zip(batches, counts, strict=True)]
    assert len(model.grads) == 1
    torch.testing.assert_close(model.grads[0], gradient_of_one_batch(*counted))


@in_every_precision
def test_a_window_in_which_nothing_counts_has_no_gradient_and_harms_nothing(precision):
    callbacks, kwargs = PRECISIONS[precision]()
    model = Tokens(token_batches(0, 0, 2, 3), lr=0.1)
    accumulation = GradientAccumulation(2, weigh_by=count_tokens)
    make_trainer(*callbacks, accumulation, **kwargs).fit(model)
    assert model.grads[0].tolist() == [0, 0]
    assert model.grads[-1].abs().min() > 0
    assert model.w.isfinite().all()


class Opaque:
    """A batch whose number of samples nobody can tell."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_where_samples_cannot_be_counted_one_warning_and_batches_count_the_same():
    class Unwraps(Regression):
        def loss(self, batch):
            return super().loss(batch.x)

    batches = random_batches(1, 4, 2, 3)
    ours, stock = (Unwraps([Opaque(batch) for batch in batches]) for _ in range(2))
    messages = fit_and_keep_warnings(make_trainer(GradientAccumulation(2), max_epochs=2), ours)
    make_trainer(accumulate_grad_batches=2, max_epochs=2).fit(stock)
    assert len(ours.grads) == 4
    assert torch.equal(torch.stack(ours.grads), torch.stack(stock.grads))
    assert len([message for message in messages if "weigh_by" in message]) == 1


def test_clipping_comes_after_the_correction():
    # The last window's gradient is 1 and clipped to 0.5; clipped first it would stay 0.5 and be
    # doubled afterwards.
    model = Unit(n=10, lr=1.0)
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    make_trainer(GradientAccumulation(4), **clipping).fit(model)
    assert model.grads == [1, 1, 1]
    assert model.w.item() == -1.5


# A factor that changes


@pytest.mark.parametrize("asker_first", [False, True])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize(("steps", "at", "applied"), [(3, 4, 6), (4, 5, 8), (6, 1, 6), (1, 3, 4)])
def test_a_new_factor_waits_for_a_boundary_of_both_windows(
    steps, at, applied, hook, asker_first, lines
):
    model, accumulation, factors = Unit(n=12), GradientAccumulation(2), Factors()
    asker = ask(accumulation, steps, at, hook)
    order = [asker, accumulation] if asker_first else [accumulation, asker]
    trainer = make_trainer(*order, factors)
    trainer.fit(model)
    assert factors.seen == [2] * applied + [steps] * (12 - applied)
    assert trainer.global_step == applied // 2 + (12 - applied) // steps
    assert logged_step(trainer) == trainer.global_step
    assert model.grads == pytest.approx([1] * trainer.global_step, rel=1e-6)
    # Asked for after the accumulation's own hook, it is seen at the next batch.
    seen = {at} if hook == "on_train_batch_start" and asker_first else {at, at + 1}
    said = [set(map(int, re.findall(r"\d+", line))) for line in lines()]
    assert [numbers for numbers in said if numbers & seen and {applied, steps} <= numbers]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 12])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 6, 11])
def test_whenever_a_factor_is_asked_for_every_gradient_is_right(at, steps, hook):
    model, accumulation, factors = Unit(n=12), GradientAccumulation(2), Factors()
    asker = ask(accumulation, steps, at, hook)
    trainer = make_trainer(accumulation, asker, factors, max_epochs=2)
    trainer.fit(model)
    assert factors.seen[:at] == [2] * at
    assert factors.seen[12:] == [steps] * 12
    assert len(model.grads) == trainer.global_step == logged_step(trainer)
    assert model.grads == pytest.approx([1] * len(model.grads), rel=1e-6)


def test_without_a_common_boundary_left_the_next_epoch_begins_with_the_new_factor():
    model, accumulation, factors = Unit(n=5), GradientAccumulation(2), Factors()
    asker = ask(accumulation, 3, 3, "on_train_batch_end")
    make_trainer(accumulation, asker, factors, max_epochs=2).fit(model)
    assert factors.seen == [2] * 5 + [3] * 5
    assert model.grads == pytest.approx([1] * 5, rel=1e-6)


def test_the_last_of_two_requests_counts():
    model, accumulation, factors = Unit(n=12), GradientAccumulation(2), Factors()
    first = ask(accumulation, 3, 1, "on_train_batch_start")
    second = ask(accumulation, 4, 2, "on_train_batch_start")
    make_trainer(accumulation, first, second, factors).fit(model)
    assert factors.seen == [2] * 4 + [4] * 8
    assert model.grads == [1] * 4


def test_a_factor_asked_for_before_the_fit_is_the_first():
    model, accumulation, factors = Unit(n=12), GradientAccumulation(2), Factors()
    start = At(0, lambda trainer: None)
    start.on_train_start = lambda trainer, pl_module: accumulation.set_steps(3)
    make_trainer(start, accumulation, factors).fit(model)
    assert factors.seen == [3] * 12
    assert model.grads == pytest.approx([1] * 4, rel=1e-6)


def test_unequal_batches_are_right_across_a_change_of_the_factor():
    batches = random_batches(1, 4, 2, 3, 5, 1, 3)
    model, accumulation = Regression(batches), GradientAccumulation(2)
    make_trainer(accumulation, ask(accumulation, 4, 2, "on_train_batch_end")).fit(model)
    windows = [batches[:2], batches[2:4], batches[4:]]
    assert len(model.grads) == len(windows)
    for got, window in zip(model.grads, windows, strict=True):
        torch.testing.assert_close(got, gradient_of_one_batch(*window))


def test_a_dict_gives_the_factor_by_epoch():
    model, factors = Unit(n=16), Factors()
    trainer = make_trainer(GradientAccumulation({0: 8, 4: 2}), factors, max_epochs=6)
    trainer.fit(model)
    assert factors.seen == [8] * 64 + [2] * 32
    assert trainer.global_step == 24
    assert model.grads == [1] * 24


def test_epochs_before_the_first_of_a_dict_do_not_accumulate():
    model, factors = Unit(n=4), Factors()
    make_trainer(GradientAccumulation({1: 2, 2: 4}), factors, max_epochs=3).fit(model)
    assert factors.seen == [1] * 4 + [2] * 4 + [4] * 4
    assert model.grads == [1] * 7


def test_switched_off_and_on_it_takes_effect_at_the_next_window(lines):
    model, accumulation, factors = Unit(n=12), GradientAccumulation(4), Factors()
    off = At(1, lambda trainer: accumulation.disable())
    on = At(7, lambda trainer: accumulation.enable())
    trainer = make_trainer(accumulation, off, on, factors)
    trainer.fit(model)
    assert factors.seen == [4] * 4 + [1] * 4 + [4] * 4
    assert model.grads == [1] * 6


# A resumed run


@resumes_inside_an_epoch
@pytest.mark.parametrize("saver_first", [False, True])
def test_a_run_resumed_inside_an_epoch_goes_on_with_the_factor(saver_first, tmp_path):
    path = tmp_path / "run.ckpt"
    callbacks = [GradientAccumulation(2), save(path, 3)]
    make_trainer(*reversed(callbacks) if saver_first else callbacks).fit(Unit(n=12))
    model, factors = Unit(n=12), Factors()
    trainer = make_trainer(GradientAccumulation(2), factors)
    trainer.fit(model, ckpt_path=path)
    assert factors.seen == [2] * 8
    assert model.grads == [1] * 4
    assert trainer.global_step == 6


@resumes_inside_an_epoch
@pytest.mark.parametrize("saver_first", [False, True])
def test_a_run_resumed_inside_a_window_has_the_gradient_of_what_is_left_of_it(
    saver_first, tmp_path
):
    path = tmp_path / "run.ckpt"
    callbacks = [GradientAccumulation(4), save(path, 4)]
    make_trainer(*reversed(callbacks) if saver_first else callbacks).fit(Unit(n=12))
    model, factors = Unit(n=12), Factors()
    trainer = make_trainer(GradientAccumulation(4), factors)
    trainer.fit(model, ckpt_path=path)
    assert factors.seen == [4] * 7
    assert model.grads == pytest.approx([1] * 2, rel=1e-6)
    assert trainer.global_step == 3


@resumed
@pytest.mark.parametrize("saved", ["in the last batch", "after the epoch"])
def test_a_run_resumed_at_an_epoch_goes_on_with_the_factor(saved, tmp_path):
    path = tmp_path / "run.ckpt"
    by_epoch = saved == "after the epoch"
    saver = ModelCheckpoint(tmp_path, filename="run", save_on_train_epoch_end=True)
    trainer = make_trainer(
        GradientAccumulation(2),
        saver if by_epoch else save(path, 11),
        enable_checkpointing=by_epoch,
    )
    trainer.fit(Unit(n=12))
    model, factors = Unit(n=12), Factors()
    trainer = make_trainer(GradientAccumulation(2), factors, max_epochs=2)
    trainer.fit(model, ckpt_path=path)
    assert factors.seen == [2] * 12
    assert model.grads == [1] * 6
    assert trainer.global_step == 12


@resumes_inside_an_epoch
def test_a_run_resumed_after_a_change_goes_on_with_the_changed_factor(tmp_path):
    path = tmp_path / "run.ckpt"
    first = GradientAccumulation(1)
    change = ask(first, 2, 0, "on_train_batch_start")
    make_trainer(first, change, save(path, 3)).fit(Unit(n=12))
    model, factors = Unit(n=12), Factors()
    trainer = make_trainer(GradientAccumulation(1), factors)
    trainer.fit(model, ckpt_path=path)
    assert factors.seen == [2] * 8
    assert model.grads == [1] * 4


@resumes_inside_an_epoch
def test_a_change_still_waiting_when_the_run_was_saved_is_made_after_it(tmp_path):
    path = tmp_path / "run.ckpt"
    first = GradientAccumulation(2)
    asker = ask(first, 3, 4, "on_train_batch_start")
    make_trainer(first, asker, save(path, 4)).fit(Unit(n=12))
    model, factors = Unit(n=12), Factors()
    make_trainer(GradientAccumulation(2), factors).fit(model, ckpt_path=path)
    assert factors.seen == [2] + [3] * 6
    assert model.grads == pytest.approx([1] * 3, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")
@resumed
@resumes_inside_an_epoch
def test_a_changed_factor_is_in_a_checkpoint_of_a_run_that_failed(tmp_path):
    class Fails(Unit):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    accumulation = GradientAccumulation(1)
    change = ask(accumulation, 2, 0, "on_train_batch_start")
    keep = OnExceptionCheckpoint(tmp_path, filename="run")
    trainer = make_trainer(accumulation, change, keep, enable_checkpointing=True)
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(Fails(n=12))
    model, factors = Unit(n=12), Factors()
    trainer = make_trainer(GradientAccumulation(1), factors)
    trainer.fit(model, ckpt_path=tmp_path / "run.ckpt")
    assert set(factors.seen) == {2}
    assert model.grads == [1] * 4


@resumes_inside_an_epoch
@pytest.mark.parametrize("changed", [False, True])
def test_other_steps_given_on_resume_are_used(changed, tmp_path):
    path = tmp_path / "run.ckpt"
    first = GradientAccumulation(2)
    asker = ask(first, 4, 1, "on_train_batch_end") if changed else Factors()
    make_trainer(first, asker, save(path, 7)).fit(Unit(n=16))
    model, factors = Unit(n=16), Factors()
    make_trainer(GradientAccumulation(8), factors).fit(model, ckpt_path=path)
    assert factors.seen == [8] * 8
    assert model.grads == [1]


def test_a_resumed_dict_goes_on_by_epoch(tmp_path):
    path = tmp_path / "run.ckpt"
    make_trainer(GradientAccumulation({0: 4, 1: 2}), save(path, 7)).fit(Unit(n=8))
    model, factors = Unit(n=8), Factors()
    trainer = make_trainer(GradientAccumulation({0: 4, 1: 2}), factors, max_epochs=2)
    trainer.fit(model, ckpt_path=path)
    assert factors.seen == [2] * 8
    assert trainer.global_step == 6


# The length of learning-rate schedules


class OneCycle(Unit):
    """Keeps the schedule's length and the learning rate of each step."""

    def __init__(self) -> None:
        super().__init__(n=64, batch_size=2)
        self.lrs: list[float] = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.w], lr=0.1)
        self.total_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.total_steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("steps", "kwargs", "expected"),
    [
        (4, {"max_epochs": 2}, 16),
        (5, {"max_epochs": 2}, 14),
        (4, {"max_epochs": 2, "max_steps": 10}, 10),
        (4, {"max_epochs": 2, "limit_train_batches": 10}, 6),
        ({0: 4, 1: 2}, {"max_epochs": 2}, 24),
        ({0: 4, 1: 2}, {"max_epochs": 2, "max_steps": 10}, 10),
        ({0: 5, 2: 3}, {"max_epochs": 4}, 36),
        ({1: 4}, {"max_epochs": 2}, 40),
        ({0: 4, 7: 2}, {"max_epochs": 2}, 16),
    ],
)
def test_a_schedule_ends_with_the_run(steps, kwargs, expected):
    model = OneCycle()
    trainer = make_trainer(GradientAccumulation(steps), **kwargs)
    trainer.fit(model)
    assert trainer.global_step == expected
    assert model.total_steps == expected
    assert len(model.lrs) == expected
    assert model.lrs[-1] == pytest.approx(0.1 / 25 / 1e4, rel=1e-9)


class UnsizedOneCycle(OneCycle):
    def train_dataloader(self):
        return DataLoader(Stream([torch.ones(1)] * self.n), batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)


@pytest.mark.parametrize("steps", [4, {0: 4, 1: 2}])
@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        (UnsizedOneCycle, {"max_epochs": 2, "max_steps": 10}),
        (UnsizedOneCycle, {"max_epochs": -1, "max_steps": 10}),
        (OneCycle, {"max_epochs": -1, "max_steps": 10}),
    ],
)
def test_where_the_number_of_batches_is_unknown_the_steps_of_the_trainer_count(
    model, kwargs, steps
):
    module = model()
    trainer = make_trainer(GradientAccumulation(steps), **kwargs)
    trainer.fit(module)
    assert trainer.global_step == module.total_steps == 10


# What it says


class Marks(pl.Callback):
    """Writes a line when the first batch begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == batch_idx == 0:
            logging.getLogger("lightning.pytorch").info("the first batch")


def test_one_line_before_the_first_batch_tells_the_windows(lines):
    model = Unit(n=22)
    make_trainer(Marks(), GradientAccumulation(5), max_epochs=2).fit(model)
    said = [line for line in lines() if "window" in line]
    assert len(said) == 1
    assert lines().index(said[0]) < lines().index("the first batch")
    assert {"5", "2"} <= set(re.findall(r"\d+", said[0]))
    assert re.search(r"\b5 optimizer steps\b", said[0])
    assert "\n" not in said[0]
    assert len(model.grads) == 10


def test_one_line_before_the_first_batch_for_a_loader_without_a_length(lines):
    make_trainer(Marks(), GradientAccumulation(4)).fit(UnsizedUnit(n=10))
    said = [line for line in lines() if "window" in line]
    assert len(said) == 1
    assert lines().index(said[0]) < lines().index("the first batch")


# What is put back, and what is refused


def test_the_trainers_factor_is_put_back_after_a_fit():
    model, factors = Unit(n=4), Factors()
    trainer = make_trainer(GradientAccumulation(2), factors)
    trainer.fit(model)
    assert factors.seen == [2] * 4
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_trainers_factor_is_put_back_after_a_failure(error):
    class Fails(Unit):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise error("on purpose")
            return super().training_step(batch, batch_idx)

    factors = Factors()
    trainer = make_trainer(GradientAccumulation(2), factors)
    # Lightning turns Ctrl-C into an exit.
    with pytest.raises((ValueError, SystemExit), match=r"on purpose|^1$"):
        trainer.fit(Fails(n=4))
    assert factors.seen == [2] * 4
    assert trainer.accumulate_grad_batches == 1


def test_a_fit_that_failed_inside_a_window_leaves_nothing_for_the_next():
    class FailsOnce(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and not self.grads:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    batches = random_batches(1, 4, 2)
    model, accumulation = FailsOnce(batches), GradientAccumulation(3)
    with pytest.raises(ValueError, match="on purpose"):
        make_trainer(accumulation).fit(model)
    model.grads.append(torch.zeros(2))
    make_trainer(accumulation).fit(model)
    assert len(model.grads) == 2
    torch.testing.assert_close(model.grads[1], gradient_of_one_batch(*batches))


def test_manual_optimization_is_refused():
    model = Unit()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match=r"(manual|automatic) optimization"):
        make_trainer(GradientAccumulation(2)).fit(model)


def test_a_factor_given_to_the_trainer_as_well_is_refused():
    trainer = make_trainer(GradientAccumulation(2), accumulate_grad_batches=2)
    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches") as error:
        trainer.fit(Unit())
    assert "\n" not in str(error.value)
    assert trainer.accumulate_grad_batches == 2


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_lightnings_scheduler_beside_it_is_refused(scheduler_first):
    callbacks = [GradientAccumulation(2), GradientAccumulationScheduler({0: 2})]
    trainer = make_trainer(*reversed(callbacks) if scheduler_first else callbacks)
    with pytest.raises(MisconfigurationException, match="`GradientAccumulationScheduler`"):
        trainer.fit(Unit())


@pytest.mark.parametrize(
    "steps",
    [0, -1, True, 2.5, "4", None, [4], {}, {-1: 2}, {"a": 2}, {0: 0}, {0: "4"}, {True: 2}],
    ids=repr,
)
def test_bad_steps_are_refused_in_one_line(steps):
    with pytest.raises((ValueError, TypeError), match=r"^`steps.*` .* got .+\.$") as error:
        GradientAccumulation(steps)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("steps", [0, True, 2.5, "4"])
def test_a_bad_factor_asked_for_is_refused_in_one_line(steps):
    with pytest.raises((ValueError, TypeError), match=r"^`(n|steps)`.* got .+\.$"):
        GradientAccumulation(2).set_steps(steps)


@pytest.mark.parametrize("weigh_by", ["sample", "tokens", "", 3, None], ids=repr)
def test_a_bad_way_to_weigh_is_refused_in_one_line(weigh_by):
    with pytest.raises((ValueError, TypeError), match=r"^`weigh_by`.* got .+") as error:
        GradientAccumulation(2, weigh_by=weigh_by)
    assert "'samples'" in str(error.value).replace('"', "'")
    assert "'batches'" in str(error.value).replace('"', "'")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [f"{__name__}.no_such_function", "no_such_module.count"])
def test_a_dotted_name_of_nothing_is_refused_in_one_line(name):
    def build_and_fit():
        make_trainer(GradientAccumulation(2, weigh_by=name)).fit(Unit())

    expected = (ValueError, MisconfigurationException)
    with pytest.raises(expected, match=f"`weigh_by`.*{re.escape(name)}") as error:
        build_and_fit()
    assert "\n" not in str(error.value)


def test_arguments_are_kept_under_their_names():
    assert GradientAccumulation(4).steps == 4
    assert GradientAccumulation(4).weigh_by == "samples"
    assert GradientAccumulation({0: 8}, weigh_by="batches").steps == {0: 8}
    assert GradientAccumulation({0: 8}, weigh_by="batches").weigh_by == "batches"


# Two processes

RANK_SIZES = ((1, 4, 2, 3, 5), (2, 1, 7, 1, 1))


class TwoRanks(Regression):
    """Each rank has its own list of batches."""

    def __init__(self, sizes: tuple[tuple[int, ...], ...], lr: float = 0.0) -> None:
        super().__init__([], lr)
        self.sizes = sizes

    def train_dataloader(self):
        self.batches = random_batches(*self.sizes[self.global_rank], seed=self.global_rank)
        return super().train_dataloader()


def fit_on_two_ranks(rank: int) -> dict[str, Tensor]:
    unequal, trained = TwoRanks(RANK_SIZES), TwoRanks(RANK_SIZES, lr=0.1)
    make_rank_trainer(GradientAccumulation(2)).fit(unequal)
    make_rank_trainer(GradientAccumulation(2)).fit(trained)
    single = TwoRanks(RANK_SIZES)
    make_rank_trainer(GradientAccumulation(1)).fit(single)
    ours, stock = (TwoRanks(((2,) * 6,) * 2, lr=0.1) for _ in range(2))
    make_rank_trainer(GradientAccumulation(3)).fit(ours)
    make_rank_trainer(accumulate_grad_batches=3).fit(stock)
    return {
        "grads": torch.stack(unequal.grads),
        "single": torch.stack(single.grads),
        "trained": trained.w.detach(),
        "ours": ours.w.detach(),
        "stock": stock.w.detach(),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(fit_on_two_ranks, tmp_path_factory.mktemp("ranks"))


def test_over_two_ranks_a_window_has_the_gradient_of_the_one_big_batch(ranks):
    batches = [random_batches(*RANK_SIZES[rank], seed=rank) for rank in (0, 1)]
    in_windows = [slice(0, 2), slice(2, 4), slice(4, 5)]
    one_by_one = [slice(i, i + 1) for i in range(5)]
    for run, windows in (("grads", in_windows), ("single", one_by_one)):
        expected = [gradient_of_one_batch(*batches[0][w], *batches[1][w]) for w in windows]
        assert torch.equal(ranks[0][run], ranks[1][run])
        torch.testing.assert_close(ranks[0][run], torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_over_two_ranks_parameters_stay_equal(ranks):
    assert not torch.equal(ranks[0]["trained"], Regression([]).w)
    assert torch.equal(ranks[0]["trained"], ranks[1]["trained"])


def test_over_two_ranks_full_windows_of_equal_batches_are_bit_equal_to_lightnings(ranks):
    assert not torch.equal(ranks[0]["stock"], Regression([]).w)
    assert torch.equal(ranks[0]["ours"], ranks[0]["stock"])


def test_the_factor_in_force_is_a_curve_in_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version="")
    trainer = make_trainer(GradientAccumulation({0: 2, 1: 4}), logger=logger, max_epochs=2)
    trainer.fit(Unit(n=8))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("accumulation/steps")]
    assert points == [(0, 2), (4, 4)]


def test_after_a_fit_with_a_schedule_it_pickles():
    accumulation = GradientAccumulation({0: 2, 1: 4})
    make_trainer(accumulation, max_epochs=2).fit(Unit(n=8))
    assert pickle.loads(pickle.dumps(accumulation)).steps == {0: 2, 1: 4}


@pytest.mark.parametrize(("asked", "steps"), [("set", 8), ("disabled", 16), ("nothing", 2)])
def test_schedules_are_as_long_as_what_was_asked_before_the_fit(asked, steps):
    class Scheduled(Unit):
        def configure_optimizers(self):
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    accumulation, model = GradientAccumulation({0: 8}), Scheduled(n=16)
    if asked == "set":
        accumulation.set_steps(2)
    elif asked == "disabled":
        accumulation.disable()
    trainer = make_trainer(accumulation)
    trainer.fit(model)
    assert trainer.global_step == model.estimate == steps


def test_lbfgs_is_refused_unless_every_batch_is_a_window():
    class Quasi(Unit):
        def configure_optimizers(self):
            return torch.optim.LBFGS([self.w])

    with pytest.raises(MisconfigurationException, match="`LBFGS`"):
        make_trainer(GradientAccumulation(2)).fit(Quasi())
    make_trainer(GradientAccumulation(1)).fit(Quasi())
