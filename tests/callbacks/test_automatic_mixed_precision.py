from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_memopt.callbacks.automatic_mixed_precision import AutomaticMixedPrecision
from lightning_memopt.core import precision as precision_module
from tests.models import Blocks, Recorder, Unit, make_trainer

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "32-true": torch.float32}
FIRST_SCALE = 65536.0
mixed = pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
# What torch and Lightning say, with reason, of a schedule that moves though the very first step was
# skipped, and of a resumed run without the callback that wrote the checkpoint.
first_step_skipped = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
resumed = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


def stock(precision: str) -> dict[str, Any]:
    """What gives a Trainer the same precision without the suite."""
    return {"plugins": [MixedPrecision(precision, "cpu")]} if precision != "32-true" else {}


class Dtypes(Blocks):
    """Keeps what dtype a linear layer computes in: stage, epoch, dtype."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[tuple[str, int, torch.dtype]] = []
        self.stem.register_forward_hook(self.see)

    def see(self, module, args, output):
        self.seen.append((self.trainer.state.stage.value, self.trainer.current_epoch, output.dtype))

    def dtypes(self, stage: str) -> list[torch.dtype]:
        return [dtype for seen, _, dtype in self.seen if seen == stage]


class Failing(Blocks):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)


class Skips(Unit):
    """The loss is infinite in the batches of `bad`; the learning rate falls from 1 to 0 in `n`."""

    def __init__(self, n: int = 10, bad: tuple[int, ...] = (0, 1), decay: int = 10) -> None:
        super().__init__(n=n, lr=1.0)
        self.bad, self.decay = bad, decay

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.inf if self.trainer.fit_loop.total_batch_idx in self.bad else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.0, total_iters=self.decay
        )
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]


class Scales(pl.Callback):
    """Keeps the loss scale at the start of every batch, `None` without a scaler."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.seen.append(None if scaler is None else scaler.get_scale())


@pytest.fixture
def lines(caplog):
    """The lines that Lightning's loggers showed so far."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return lambda: [record.getMessage() for record in caplog.records]


def trained(model_class: type[Blocks], *callbacks: pl.Callback, **kwargs: Any) -> dict[str, Tensor]:
    """Return the weights after two epochs from a fixed start."""
    torch.manual_seed(0)
    model = model_class()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = make_trainer(*callbacks, **({"max_epochs": 2, "limit_val_batches": 0} | kwargs))
    trainer.fit(model)
    assert trainer.global_step > 0
    end = model.state_dict()
    assert not torch.equal(start["head.weight"], end["head.weight"])
    return end


def assert_bit_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


# What is computed


@pytest.mark.parametrize("precision", DTYPES)
def test_layers_compute_in_the_precision_that_was_asked_for(precision, lines):
    model = Dtypes()
    make_trainer(AutomaticMixedPrecision(precision)).fit(model)
    assert model.dtypes("train") == [DTYPES[precision]] * 6
    assert model.stem.weight.dtype is torch.float32
    assert len([line for line in lines() if precision in line]) == 1


@pytest.mark.parametrize("precision", DTYPES)
def test_weights_are_bit_equal_to_lightnings_own_precision(precision):
    ours = trained(Blocks, AutomaticMixedPrecision(precision))
    assert_bit_equal(ours, trained(Blocks, **stock(precision)))


@mixed
def test_mixed_precision_is_not_full_precision(precision):
    ours, full = trained(Blocks, AutomaticMixedPrecision(precision)), trained(Blocks)
    assert not torch.equal(ours["stem.weight"], full["stem.weight"])


@pytest.mark.parametrize("precision", DTYPES)
def test_accumulated_and_clipped_weights_are_bit_equal_to_lightnings(precision):
    kwargs = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01}
    ours = trained(Blocks, AutomaticMixedPrecision(precision), **kwargs)
    assert_bit_equal(ours, trained(Blocks, **kwargs, **stock(precision)))


def test_bf16_is_the_same_as_the_trainers_own_word():
    ours = trained(Blocks, AutomaticMixedPrecision("bf16-mixed"))
    assert_bit_equal(ours, trained(Blocks, precision="bf16-mixed"))


def test_fp16_scales_the_loss_and_unscales_the_gradient():
    class Backward(Unit):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.w.data += 1
            self.losses = []

        def backward(self, loss, *args, **kwargs):
            self.losses.append(loss.item())
            super().backward(loss, *args, **kwargs)

    model = Backward(n=3)
    make_trainer(AutomaticMixedPrecision("16-mixed")).fit(model)
    assert model.losses == [FIRST_SCALE] * 3
    assert model.grads == [1, 1, 1]


@mixed
@pytest.mark.parametrize(
    ("run", "stage", "batches"),
    [("validate", "validate", 6), ("test", "test", 6), ("predict", "predict", 6)],
)
def test_evaluation_alone_computes_in_mixed_precision_too(run, stage, batches, precision):
    model = Dtypes()
    trainer = make_trainer(AutomaticMixedPrecision(precision))
    before = trainer.precision_plugin
    getattr(trainer, run)(model, **({} if run == "predict" else {"verbose": False}))
    assert model.dtypes(stage) == [DTYPES[precision]] * batches
    assert trainer.precision_plugin is before


def test_validation_inside_a_fit_computes_in_mixed_precision_too():
    model = Dtypes()
    make_trainer(AutomaticMixedPrecision("bf16-mixed"), num_sanity_val_steps=0).fit(model)
    assert model.dtypes("validate") == [torch.bfloat16] * 6


@mixed
def test_before_its_first_epoch_everything_is_in_full_precision(precision):
    model = Dtypes()
    trainer = make_trainer(AutomaticMixedPrecision(precision, start_epoch=1), max_epochs=3)
    trainer.fit(model)
    for stage in ("train", "validate"):
        full = [dtype for seen, epoch, dtype in model.seen if seen == stage and epoch < 1]
        after = [dtype for seen, epoch, dtype in model.seen if seen == stage and epoch >= 1]
        assert full == [torch.float32] * 6
        assert after == [DTYPES[precision]] * 12


@mixed
def test_the_epochs_before_the_first_are_bit_equal_to_full_precision(precision):
    late = AutomaticMixedPrecision(precision, start_epoch=1)
    assert_bit_equal(trained(Blocks, late, max_epochs=1), trained(Blocks, max_epochs=1))
    late = AutomaticMixedPrecision(precision, start_epoch=1)
    assert not torch.equal(trained(Blocks, late)["stem.weight"], trained(Blocks)["stem.weight"])


class Switches(pl.Callback):
    """Switches the precision off at the end of batch `off` and on again at that of batch `on`."""

    def __init__(self, precision: AutomaticMixedPrecision, off: int, on: int) -> None:
        self.precision, self.off, self.on = precision, off, on

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.off:
            self.precision.disable()
        if batch_idx == self.on:
            self.precision.enable()


@mixed
def test_switched_off_and_on_it_takes_effect_at_the_next_step(precision, lines):
    model, callback = Dtypes(), AutomaticMixedPrecision(precision)
    make_trainer(callback, Switches(callback, off=1, on=3)).fit(model)
    low, full = DTYPES[precision], torch.float32
    assert model.dtypes("train") == [low] * 2 + [full] * 2 + [low] * 2


@pytest.mark.parametrize("off", [0, 1, 2, 3])
@mixed
def test_switched_off_inside_a_window_every_gradient_is_right(precision, off):
    model, callback = Unit(n=12), AutomaticMixedPrecision(precision)
    scales = Scales()
    trainer = make_trainer(
        callback, Switches(callback, off=off, on=off + 5), scales, accumulate_grad_batches=4
    )
    trainer.fit(model)
    assert model.grads == [1, 1, 1]
    if precision == "16-mixed":
        assert set(scales.seen) == {FIRST_SCALE, None}


# What "auto" chooses


def assert_auto_chooses(chosen: str, reason: str, lines) -> None:
    model, callback = Dtypes(), AutomaticMixedPrecision()
    make_trainer(callback).fit(model)
    assert callback.precision == "auto"
    assert model.dtypes("train") == [DTYPES[chosen]] * 6
    said = [line for line in lines() if chosen in line]
    assert len(said) == 1
    assert reason in said[0]


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_auto_is_bf16_on_a_cpu_that_computes_in_it_and_says_so(flag, lines, monkeypatch):
    monkeypatch.setattr(precision_module, "cpu_flags", lambda: {"avx2", flag})
    assert_auto_chooses("bf16-mixed", "bf16", lines)


def test_auto_is_full_precision_on_a_cpu_that_does_not_and_says_so(lines, monkeypatch):
    monkeypatch.setattr(precision_module, "cpu_flags", lambda: {"avx2", "avx512f", "amx_tile"})
    assert_auto_chooses("32-true", "AVX512-BF16", lines)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the flags are read from Linux")
def test_auto_goes_by_this_cpu(lines):
    flags = set(Path("/proc/cpuinfo").read_text().split())
    chosen = "bf16-mixed" if {"avx512_bf16", "amx_bf16"} & flags else "32-true"
    assert_auto_chooses(chosen, "", lines)


# The state in the checkpoint


@first_step_skipped
@resumed
@pytest.mark.parametrize("resumed_by", ["suite", "Lightning"])
@pytest.mark.parametrize("saved_by", ["suite", "Lightning"])
def test_the_scale_is_in_the_checkpoint_whoever_wrote_and_reads_it(saved_by, resumed_by, tmp_path):
    def make(by, *callbacks, **kwargs):
        if by == "suite":
            return make_trainer(AutomaticMixedPrecision("16-mixed"), *callbacks, **kwargs)
        return make_trainer(*callbacks, **kwargs, **stock("16-mixed"))

    keep = ModelCheckpoint(tmp_path, filename="run", save_on_train_epoch_end=True)
    make(saved_by, keep, enable_checkpointing=True).fit(Skips())
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert state["MixedPrecision"]["scale"] == FIRST_SCALE / 4

    scales, model = Scales(), Skips(bad=())
    make(resumed_by, scales, max_epochs=2).fit(model, ckpt_path=tmp_path / "run.ckpt")
    assert scales.seen == [FIRST_SCALE / 4] * 10
    assert model.grads == [1] * 10


@resumed
def test_the_scale_of_a_late_start_comes_back_too(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="run", save_on_train_epoch_end=True)
    late = AutomaticMixedPrecision("16-mixed", start_epoch=1)
    make_trainer(late, keep, max_epochs=2, enable_checkpointing=True).fit(Skips(bad=(11,)))
    scales = Scales()
    late = AutomaticMixedPrecision("16-mixed", start_epoch=1)
    trainer = make_trainer(late, scales, max_epochs=3)
    trainer.fit(Skips(bad=()), ckpt_path=tmp_path / "run.ckpt")
    assert scales.seen == [FIRST_SCALE / 2] * 10


@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")
@resumed
def test_the_scale_is_in_a_checkpoint_of_a_run_that_failed(tmp_path):
    class Fails(Skips):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise ValueError("on purpose")
            return super().training_step(batch, batch_idx)

    keep = OnExceptionCheckpoint(tmp_path, filename="run")
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed"), keep, enable_checkpointing=True)
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(Fails(bad=(3,)))
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert state["MixedPrecision"]["scale"] == FIRST_SCALE / 2


@resumed
def test_a_run_saved_before_its_late_start_resumes_and_starts(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="run", save_on_train_epoch_end=True)
    late = AutomaticMixedPrecision("16-mixed", start_epoch=1)
    make_trainer(late, keep, enable_checkpointing=True).fit(Dtypes())
    model = Dtypes()
    late = AutomaticMixedPrecision("16-mixed", start_epoch=1)
    make_trainer(late, max_epochs=2).fit(model, ckpt_path=tmp_path / "run.ckpt")
    assert model.dtypes("train") == [torch.float16] * 6


# Skipped steps


@first_step_skipped
def test_skipped_steps_and_the_scale_are_logged():
    recorder = Recorder()
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed"), logger=recorder)
    trainer.fit(Skips())
    assert trainer.global_step == 10
    assert recorder.values("amp/skipped_steps")[-1] == 2
    assert recorder.values("amp/scale")[-1] == FIRST_SCALE / 4
    for key in ("amp/skipped_steps", "amp/scale"):
        assert {type(value) for value in recorder.values(key)} == {float}
        steps = [step for step, metrics in recorder.points if key in metrics]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("hold", [False, True])
def test_without_a_scaler_no_scale_is_logged(hold):
    recorder = Recorder()
    callback = AutomaticMixedPrecision("bf16-mixed", hold_lr_on_skip=hold)
    model = Skips(bad=())
    make_trainer(callback, logger=recorder).fit(model)
    assert recorder.values("amp/scale") == []
    assert model.schedule.last_epoch == 10


@pytest.mark.parametrize(
    ("hold", "position", "lr"),
    [(True, 8, 0.2), pytest.param(False, 10, 0.0, marks=first_step_skipped)],
)
def test_the_schedule_waits_for_skipped_steps_when_asked_to(hold, position, lr):
    model = Skips()
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=hold))
    trainer.fit(model)
    assert trainer.global_step == 10
    assert model.schedule.last_epoch == position
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(lr, abs=1e-9)


@pytest.mark.parametrize("bad", [(3,), (9,), (0, 4, 9)])
def test_the_schedule_waits_wherever_steps_are_skipped(bad):
    model = Skips(bad=bad)
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=True))
    trainer.fit(model)
    assert model.schedule.last_epoch == 10 - len(bad)


@pytest.mark.parametrize(("bad", "position"), [((0,), 2), ((1,), 2), ((3, 4), 1), ((8,), 2)])
def test_the_schedule_waits_for_a_skipped_window(bad, position):
    model = Skips(n=12, bad=bad)
    callback = AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=True)
    trainer = make_trainer(callback, accumulate_grad_batches=4)
    trainer.fit(model)
    assert trainer.global_step == 3
    assert model.schedule.last_epoch == position


def test_the_schedule_moves_on_when_switched_off_after_a_skipped_step():
    model, callback = Skips(bad=(3,)), AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=True)
    make_trainer(callback, Switches(callback, off=3, on=99)).fit(model)
    assert model.schedule.last_epoch == 9


def test_a_held_schedule_moves_freely_in_the_next_fit():
    callback = AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=True)
    make_trainer(callback).fit(Skips(bad=(9,)))
    model = Skips(bad=())
    make_trainer(callback).fit(model)
    assert model.schedule.last_epoch == 10


# Optimizers of all kinds


class TwoManual(Blocks):
    """Two optimizers, stepped by hand."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self):
        front = [*self.stem.parameters(), *self.blocks.parameters()]
        return torch.optim.SGD(front, lr=0.05), torch.optim.Adam(self.head.parameters(), lr=0.01)


class CallsSuper(Blocks):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class CallsStep(Blocks):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class LeavesOut(Blocks):
    """Runs the closure alone in every other batch, as Lightning's docs show."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class Fused(Blocks):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, fused=True)


class Unfused(Blocks):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@mixed
@pytest.mark.parametrize("model", [TwoManual, CallsSuper, CallsStep, LeavesOut, Fused])
def test_every_usual_way_to_step_is_bit_equal_to_lightnings_precision(model, precision):
    ours = trained(model, AutomaticMixedPrecision(precision))
    assert_bit_equal(ours, trained(model, **stock(precision)))


class BypassesScaler(Blocks):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.optimizer.step()


class BypassesScalerWithClosure(Blocks):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.optimizer.step(optimizer_closure)


class BypassesScalerByHand(TwoManual):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers(use_pl_optimizer=False)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        self.optimizers()[1].step()


bypasses = pytest.mark.parametrize(
    "model", [BypassesScaler, BypassesScalerWithClosure, BypassesScalerByHand]
)


@bypasses
def test_a_step_that_bypasses_the_scaler_is_refused(model):
    torch.manual_seed(0)
    module = model()
    start = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(RuntimeError, match=r"scaler") as error:
        make_trainer(AutomaticMixedPrecision("16-mixed")).fit(module)
    assert "\n" not in str(error.value)
    assert "step" in str(error.value)
    assert all(map(torch.equal, module.parameters(), start))


@bypasses
def test_without_a_scaler_there_is_nothing_to_bypass(model):
    ours = trained(model, AutomaticMixedPrecision("bf16-mixed"))
    assert_bit_equal(ours, trained(model, **stock("bf16-mixed")))


def test_after_a_fit_an_optimizer_may_be_stepped_by_hand():
    model = Blocks()
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed"))
    trainer.fit(model)
    before = model.head.weight.detach().clone()
    optimizer = trainer.optimizers[0]
    optimizer.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight)


def refused_at_the_start(match: str, model: pl.LightningModule, callback, **kwargs: Any) -> None:
    """Assert that the fit is refused before a batch is computed, in one line."""
    batches = Scales()
    trainer = make_trainer(callback, batches, num_sanity_val_steps=0, **kwargs)
    before = trainer.precision_plugin
    with pytest.raises(MisconfigurationException, match=match) as error:
        trainer.fit(model)
    assert "\n" not in str(error.value)
    assert batches.seen == []
    assert trainer.precision_plugin is before


def test_fp16_with_a_fused_optimizer_and_clipping_is_refused_at_the_start():
    callback = AutomaticMixedPrecision("16-mixed")
    refused_at_the_start(r"fused", Fused(), callback, gradient_clip_val=1.0)


def test_bf16_with_a_fused_optimizer_and_clipping_is_right():
    # Lightning's plugin refuses it in the first step, though in bf16 nothing has to be unscaled.
    ours = trained(Fused, AutomaticMixedPrecision("bf16-mixed"), gradient_clip_val=0.1)
    unfused = trained(Unfused, gradient_clip_val=0.1, **stock("bf16-mixed"))
    for key in unfused:
        torch.testing.assert_close(ours[key], unfused[key], rtol=1e-2, atol=1e-2)


class SecondOrder(Blocks):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


def test_fp16_with_lbfgs_is_refused_at_the_start():
    refused_at_the_start(r"LBFGS", SecondOrder(), AutomaticMixedPrecision("16-mixed"))


def test_bf16_with_lbfgs_is_right():
    ours = trained(SecondOrder, AutomaticMixedPrecision("bf16-mixed"))
    assert_bit_equal(ours, trained(SecondOrder, **stock("bf16-mixed")))


def test_holding_the_schedule_in_manual_optimization_is_refused():
    callback = AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=True)
    refused_at_the_start(
        r"`hold_lr_on_skip.*(manual|automatic) optimization", TwoManual(), callback
    )


# What is put back, and what is refused


@pytest.mark.parametrize("start_epoch", [0, 1])
@mixed
def test_the_precision_plugin_is_put_back_after_a_fit(precision, start_epoch):
    trainer = make_trainer(AutomaticMixedPrecision(precision, start_epoch), max_epochs=2)
    before, model = trainer.precision_plugin, Dtypes()
    trainer.fit(model)
    assert model.dtypes("train")[-1] is DTYPES[precision]
    assert trainer.precision_plugin is before
    assert trainer.strategy.precision_plugin is before


@mixed
def test_the_precision_plugin_is_put_back_after_a_failure(precision):
    trainer = make_trainer(AutomaticMixedPrecision(precision))
    before = trainer.precision_plugin
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit(Failing())
    assert trainer.precision_plugin is before
    assert trainer.strategy.precision_plugin is before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
        {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    ],
    ids=["bf16-mixed", "bf16-true", "64-true", "bf16 plugin", "fp16 plugin"],
)
@pytest.mark.parametrize("precision", ["auto", "32-true", "16-mixed"])
def test_a_trainer_that_has_a_precision_already_is_refused(precision, kwargs):
    refused_at_the_start(r"precision=", Unit(), AutomaticMixedPrecision(precision), **kwargs)


@pytest.mark.parametrize("precision", ["fp16", "16", 16, "bf16-true", "", None, ["16-mixed"]])
def test_an_unknown_precision_is_refused_with_those_that_exist(precision):
    with pytest.raises(ValueError, match=r"^`precision` .*'bf16-mixed'.*'16-mixed'.* got "):
        AutomaticMixedPrecision(precision)


@pytest.mark.parametrize("start_epoch", [-1, True, 1.0, "1", None])
def test_a_bad_first_epoch_is_refused(start_epoch):
    with pytest.raises((ValueError, TypeError), match=r"^`start_epoch` .* got .+\.$"):
        AutomaticMixedPrecision("bf16-mixed", start_epoch=start_epoch)


@pytest.mark.parametrize("hold", [0, 1, "yes", None])
def test_holding_is_true_or_false(hold):
    with pytest.raises(TypeError, match=r"^`hold_lr_on_skip` .* got .+\.$"):
        AutomaticMixedPrecision("16-mixed", hold_lr_on_skip=hold)


def test_arguments_are_kept_under_their_names():
    callback = AutomaticMixedPrecision("16-mixed", start_epoch=3, hold_lr_on_skip=True)
    kept = (callback.precision, callback.start_epoch, callback.hold_lr_on_skip)
    assert kept == ("16-mixed", 3, True)
    default = AutomaticMixedPrecision()
    kept = (default.precision, default.start_epoch, default.hold_lr_on_skip)
    assert kept == ("auto", 0, False)


def test_the_model_is_left_as_it_was():
    model = Blocks()
    kinds = [type(module) for module in model.modules()]
    make_trainer(AutomaticMixedPrecision("bf16-mixed")).fit(model)
    assert [type(module) for module in model.modules()] == kinds
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert isinstance(model.head, nn.Linear)


def test_an_evaluation_after_a_fit_leaves_the_scale_of_the_fit(tmp_path):
    trainer = make_trainer(AutomaticMixedPrecision("16-mixed"))
    model = Skips(bad=(3, 4))
    model.validation_step = lambda batch, batch_idx: None
    trainer.fit(model)
    trainer.validate(model, Blocks().val_dataloader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert state["MixedPrecision"]["scale"] == FIRST_SCALE / 4
