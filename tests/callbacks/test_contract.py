"""One life for every exported callback: built, copied, from YAML, fitted, failing, all together."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_memopt
from tests.models import Blocks, Recorder, make_trainer

# What a constructor can't do without.
REQUIRED: dict[str, dict[str, Any]] = {"GradientAccumulation": {"steps": 2}}
# What makes a callback that is idle by default, or decides by the machine, do its work here.
ACTIVE: dict[str, dict[str, Any]] = {
    "AutoAccumulation": {"micro_batch_size": 3},
    "AutomaticMixedPrecision": {"precision": "bf16-mixed"},
    "EmptyCache": {"when": ["step", "epoch", "before_validation"]},
    "GradientAccumulation": {"steps": 2},
    "MemoryProfiler": {"steps": [1]},
}
# What leaves the result of training as it is, to the bit.
NEUTRAL: dict[str, dict[str, Any]] = {
    "AutomaticMixedPrecision": {"precision": "32-true"},
    "EmptyCache": {"when": ["step", "epoch", "before_validation"]},
    "GradientAccumulation": {"steps": 1},
    "MemoryProfiler": {"steps": [1]},
}
KEYS = ("memory", "memory_phase", "memory_val", "memory_ranks", "accumulation", "amp", "cache")


def is_callback(name: str) -> bool:
    thing = getattr(lightning_memopt, name)
    return inspect.isclass(thing) and issubclass(thing, Callback)


# These steps take a millisecond, so that what a call of `empty_cache` costs is worth a warning.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`EmptyCache\(when=.*call it less often"),
    pytest.mark.filterwarnings("ignore:.*normalise over the batch"),
    # By default it profiles a step that these runs don't get to.
    pytest.mark.filterwarnings(r"ignore:`MemoryProfiler\(steps=.*found no step"),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files there
    # To draw takes most of the time of a profile, and touches nothing that is looked at here.
    monkeypatch.setattr("lightning_memopt.callbacks._profile_report.has_pictures", bool)


NAMES = sorted(name for name in lightning_memopt.__all__ if is_callback(name))
EVERY = pytest.mark.parametrize("name", NAMES)
# Two that want the same thing don't go together; each of them is in half of the orders.
RIVALS = ("AutoAccumulation", "GradientAccumulation")
ORDERS = [
    [name for name in random.Random(seed).sample(NAMES, len(NAMES)) if name != RIVALS[seed % 2]]
    for seed in range(4)
]


def make(name: str, kind: dict[str, dict[str, Any]] = ACTIVE) -> Any:
    return getattr(lightning_memopt, name)(**kind.get(name, {}))


def build(model: type[Blocks] = Blocks, **kwargs: Any) -> Blocks:
    torch.manual_seed(0)
    return model(**kwargs)


def fit(model: Blocks, *callbacks: Callback, ckpt_path: Path | None = None, **kwargs: Any) -> Any:
    trainer = make_trainer(*callbacks, **kwargs)
    torch.manual_seed(1)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(value.isfinite().all() for value in found.values())
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def methods_of_instance(thing: object) -> list[str]:
    """Return the methods that an object has of its own, over those of its class."""
    return sorted(
        name
        for name, value in vars(thing).items()
        if callable(value) and inspect.isroutine(getattr(type(thing), name, None))
    )


def traces(model: nn.Module, trainer: Any) -> dict[str, Any]:
    """Return all that a callback could leave behind on the model and the trainer."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    parts = {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "precision": trainer.precision_plugin,
        "fit_loop": trainer.fit_loop,
        "epoch_loop": trainer.fit_loop.epoch_loop,
        "optimization": trainer.fit_loop.epoch_loop.automatic_optimization,
        **{f"optimizer {i}": optimizer for i, optimizer in enumerate(trainer.optimizers)},
    }
    return {
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": [
            (name, hook, len(vars(module)[hook] or ()))
            for name, module in model.named_modules()
            for hook in hooks
            if isinstance(vars(module)[hook], dict)
        ],
        "parameter hooks": [
            name
            for name, parameter in model.named_parameters()
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ],
        "methods": {name: methods_of_instance(part) for name, part in parts.items()},
        "types": {name: type(part) for name, part in parts.items()},
        "attributes of parts": {name: sorted(vars(part)) for name, part in parts.items()},
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "functions of torch": [
            (module.__name__, name, function)
            for module in (torch, torch.cuda, torch.cuda.memory, torch.accelerator, torch.autograd)
            for name, function in sorted(vars(module).items())
            if inspect.isfunction(function)
        ],
        "is_recomputing": lightning_memopt.is_recomputing(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default_dtype": torch.get_default_dtype(),
    }


class Sabotage(Exception):  # noqa: N818 - what a user's own exception may be called
    pass


class Failing(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise Sabotage("of the training step")
        return super().training_step(batch, batch_idx)


class FailingInBackward(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            loss.register_hook(self.fail)
        return loss

    def fail(self, grad: Tensor) -> None:
        raise Sabotage("of the backward")


class At(Callback):
    """Call a function with the trainer and the module at one batch, in the middle of a step."""

    def __init__(self, batch_idx: int, function: Callable[[Any, Any], Any]) -> None:
        self.batch_idx, self.function, self.calls = batch_idx, function, 0
        self.last = -1

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        total = trainer.fit_loop.total_batch_idx
        if trainer.fit_loop.batch_idx == self.batch_idx and total != self.last:
            self.last = total  # a batch that is split comes here several times
            self.calls += 1
            self.function(trainer, pl_module)


def test_the_suite_is_under_this_contract() -> None:
    assert len(NAMES) >= 5
    assert len({tuple(order) for order in ORDERS}) == len(ORDERS)


# Built, copied, from YAML


@EVERY
def test_arguments_are_stored_under_their_names_and_nothing_else_is_done(name: str) -> None:
    callback = make(name, REQUIRED)
    expected = {
        key: REQUIRED.get(name, {}).get(key, parameter.default)
        for key, parameter in inspect.signature(type(callback)).parameters.items()
    }
    assert vars(callback) == expected


@EVERY
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_copy_of_a_callback_trains_as_the_original(
    name: str, copied: Callable[[Any], Any], when: str
) -> None:
    callback, model = make(name), build()
    arguments = {
        key: getattr(callback, key) for key in inspect.signature(type(callback)).parameters
    }
    twins = [copied(callback)] if when == "before" else []
    moment = At(3, lambda *_: twins.append(copied(callback)))
    fit(model, callback, *([moment] if when == "during" else []))
    if when == "after":
        twins.append(copied(callback))
    (twin,) = twins
    assert type(twin) is type(callback)
    assert {key: getattr(twin, key) for key in arguments} == arguments
    again = build()
    fit(again, twin)
    assert_equal(weights(again), weights(model))


@EVERY
@pytest.mark.parametrize("kind", [REQUIRED, ACTIVE], ids=["required", "active"])
def test_yaml_builds_and_runs_a_callback(
    name: str,
    kind: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = kind.get(name, {})
    callback = {"class_path": f"lightning_memopt.{name}", "init_args": arguments}
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [callback],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(path)])
    cli = LightningCLI(Blocks, save_config_callback=None, seed_everything_default=False)
    (found,) = [c for c in cli.trainer.callbacks if type(c).__name__ == name]
    assert {key: getattr(found, key) for key in arguments} == arguments
    assert cli.trainer.state.finished
    assert cli.trainer.global_step > 0


# Fitted, twice, and in the other stages


@EVERY
def test_a_second_fit_is_as_the_first(name: str) -> None:
    callback = make(name)
    first, second = build(), build()
    fit(first, callback)
    fit(second, callback)
    assert_equal(weights(second), weights(first))
    assert first.global_step == second.global_step > 0


@EVERY
def test_going_on_with_the_same_trainer_is_as_with_a_fresh_callback(name: str) -> None:
    models = []
    for is_fresh in (False, True):
        model, callback = build(), make(name)
        trainer = fit(model, callback)
        if is_fresh:
            trainer.callbacks[trainer.callbacks.index(callback)] = make(name)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model)
        assert trainer.current_epoch == 2
        models.append(model)
    assert_equal(weights(models[0]), weights(models[1]))


@EVERY
def test_evaluation_gives_what_it_gives_without(name: str) -> None:
    found = []
    for callbacks in ([], [make(name, NEUTRAL)]):
        model, trainer = build(), make_trainer(*callbacks)
        metrics = [trainer.validate(model, verbose=False), trainer.test(model, verbose=False)]
        predictions = torch.cat(trainer.predict(model))
        found.append((metrics, predictions.tolist()))
        assert len(predictions) == model.n
    assert found[0] == found[1]


@EVERY
def test_a_fit_without_validation_data_runs(name: str) -> None:
    trainer = fit(build(), make(name), limit_val_batches=0, max_epochs=2)
    assert trainer.current_epoch == 2


@EVERY
def test_sanity_checking_and_several_validations_an_epoch_change_nothing(name: str) -> None:
    models = []
    for sanity_steps in (0, 2):
        models.append(build())
        fit(models[-1], make(name), num_sanity_val_steps=sanity_steps, val_check_interval=2)
    assert_equal(weights(models[0]), weights(models[1]))


# What is put back


@EVERY
def test_a_finished_fit_leaves_nothing_behind(name: str) -> None:
    plain, model = build(), build()
    expected = traces(plain, fit(plain))
    assert traces(model, fit(model, make(name))) == expected


@EVERY
@pytest.mark.parametrize("failing", [Failing, FailingInBackward])
def test_a_failing_fit_leaves_nothing_behind(name: str, failing: type[Blocks]) -> None:
    found = []
    for callbacks in ([], [make(name)]):
        model, trainer = build(failing), make_trainer(*callbacks)
        plugin = trainer.precision_plugin
        with pytest.raises(Sabotage, match="of the"):
            trainer.fit(model)
        assert trainer.precision_plugin is plugin
        found.append(traces(model, trainer))
    assert found[1] == found[0]


@EVERY
def test_a_fit_after_a_failing_fit_is_as_a_first_one(name: str) -> None:
    callback = make(name)
    with pytest.raises(Sabotage, match="of the training step"):
        fit(build(Failing), callback)
    again, fresh = build(), build()
    fit(again, callback)
    fit(fresh, make(name))
    assert_equal(weights(again), weights(fresh))


@pytest.fixture
def interrupt_handler() -> Iterator[None]:
    # Lightning ignores SIGINT from the first Ctrl-C on.
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@EVERY
@pytest.mark.usefixtures("interrupt_handler")
def test_ctrl_c_leaves_nothing_behind(name: str) -> None:
    found = []
    for callbacks in ([], [make(name)]):
        model, moment = build(), At(2, interrupt)
        trainer = make_trainer(*callbacks, moment)
        with pytest.raises(SystemExit, match="1"):
            trainer.fit(model)
        assert moment.calls == 1
        found.append(traces(model, trainer))
    assert found[1] == found[0]


@EVERY
def test_closing_twice_is_harmless(name: str) -> None:
    callback, model = make(name), build()
    trainer = fit(model, callback)
    callback.teardown(trainer, model, "fit")
    callback.on_exception(trainer, model, Sabotage("late"))
    assert "undo" not in vars(callback)


# The model stays the user's


def surface(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "keys": list(model.state_dict()),
        "types": {name: type(module) for name, module in model.named_modules()},
    }


@EVERY
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_names_and_copies_of_the_model_are_its_own_during_and_after_a_fit(
    name: str, copied: Callable[[Any], Any]
) -> None:
    model = build()
    expected = surface(model)
    seen = []

    def look(trainer: Any, module: Blocks) -> None:
        twin = copied(module)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        # A residual block of zeros returns its input; the original's weights would not.
        x = torch.randn(4, 8)
        strays = sum((block(x) - x).abs().sum().item() for block in twin.blocks)
        seen.append((surface(module), surface(twin), strays))

    moment = At(3, look)
    trainer = fit(model, make(name), moment)
    look(trainer, model)
    assert moment.calls == 1
    assert seen == [(expected, expected, 0.0)] * 2


@EVERY
def test_looking_at_the_model_during_a_fit_changes_no_result(name: str) -> None:
    looked, plain = build(), build()
    fit(looked, make(name), At(3, lambda _, module: pickle.dumps(copy.deepcopy(module))))
    fit(plain, make(name))
    assert_equal(weights(looked), weights(plain))


@EVERY
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create")
@pytest.mark.parametrize("is_saved_with", [True, False])
def test_checkpoints_load_with_and_without(name: str, is_saved_with: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    model = build()
    fit(model, *([make(name)] if is_saved_with else [])).save_checkpoint(path)
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert_equal(stored, weights(model))

    ends = []
    for callbacks in ([], [make(name, NEUTRAL)]):
        resumed = build()
        trainer = fit(resumed, *callbacks, max_epochs=2, ckpt_path=path)
        assert trainer.current_epoch == 2
        ends.append(weights(resumed))
        if is_saved_with and name in {*RIVALS, "AutomaticMixedPrecision"}:
            continue  # the checkpoint's own setting goes on: not that of the run without
        assert_equal(ends[-1], ends[0])


# Owners, switches, logs


@EVERY
def test_a_second_owner_of_the_same_thing_is_refused_in_setup(name: str) -> None:
    first, second = make(name), make(name)
    second.__class__ = type("Other", (type(second),), {})  # Lightning keeps one of each state key
    model, trainer = build(), make_trainer(first, second)
    if first.owns is None:
        trainer.fit(model)
        assert trainer.state.finished
        return
    with pytest.raises(MisconfigurationException, match=f"`Other` and `{name}` both want"):
        trainer.fit(model)
    assert trainer.global_step == 0
    again = build()
    fit(again, first)
    assert trainer.accumulate_grad_batches == 1


@EVERY
def test_a_trainer_of_the_other_package_is_refused_in_one_line(name: str) -> None:
    class Module(pytorch_lightning.LightningModule):
        training_step = Blocks.training_step
        loss = Blocks.loss
        train_dataloader = Blocks.loader
        configure_optimizers = Blocks.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.n, self.batch_size = 8, 4
            self.blocks = nn.Linear(4, 1)
            self.forward = self.blocks.forward

    trainer = pytorch_lightning.Trainer(
        callbacks=[make(name)],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(MisconfigurationException, match=r"^[^\n]*two packages don't mix[^\n]*$"):
        trainer.fit(Module())


SWITCHED = [name for name in NAMES if hasattr(getattr(lightning_memopt, name), "enable")]


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_off_does_nothing(name: str) -> None:
    callback, plain, model = make(name), build(), build()
    callback.disable()
    expected = fit(plain).global_step
    assert fit(model, callback).global_step == expected
    assert_equal(weights(model), weights(plain))


@pytest.mark.parametrize("name", SWITCHED)
def test_switching_while_training_runs_is_put_back_too(name: str) -> None:
    callback, plain, model = make(name), build(), build()
    off, on = At(1, lambda *_: callback.disable()), At(4, lambda *_: callback.enable())
    expected = traces(plain, fit(plain, max_epochs=2))
    trainer = fit(model, callback, off, on, max_epochs=2)
    assert (off.calls, on.calls) == (2, 2)
    assert trainer.current_epoch == 2
    assert traces(model, trainer) == expected


@EVERY
def test_logged_values_are_floats_under_known_keys_on_a_rising_axis(name: str) -> None:
    recorder = Recorder()
    fit(build(), make(name), logger=recorder, log_every_n_steps=1, max_epochs=2)
    points = [
        (step, key, value) for step, values in recorder.points for key, value in values.items()
    ]
    own = [(s, k, v) for s, k, v in points if k not in {"val_loss", "epoch"}]
    assert {type(value) for _, _, value in own} <= {float}
    assert {key.partition("/")[0] for _, key, _ in own} <= set(KEYS)
    for key in {key for _, key, _ in own}:
        steps = [step for step, k, _ in own if k == key]
        is_one_a_step = not key.startswith("cache/")  # several calls may fall on one step
        assert steps == sorted(set(steps) if is_one_a_step else steps), key


# All together


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_all_together_train_the_same_in_any_order(order: list[str]) -> None:
    first, model = build(), build()
    steps = fit(first, *map(make, sorted(order)), max_epochs=2).global_step
    trainer = fit(model, *map(make, order), max_epochs=2)
    assert trainer.global_step == steps == (6 if "GradientAccumulation" in order else 12)
    assert_equal(weights(model), weights(first))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_all_that_are_neutral_train_as_none(order: list[str]) -> None:
    plain, model = build(), build()
    fit(plain, max_epochs=2)
    fit(model, *(make(name, NEUTRAL) for name in order), max_epochs=2)
    assert_equal(weights(model), weights(plain))


@EVERY
def test_each_that_is_neutral_trains_as_none(name: str) -> None:
    plain, model = build(), build()
    fit(plain, max_epochs=2)
    fit(model, make(name, NEUTRAL), max_epochs=2)
    assert_equal(weights(model), weights(plain))


@pytest.mark.parametrize("order", ORDERS[:2], ids="-".join)
@pytest.mark.parametrize("failing", [Failing, FailingInBackward])
def test_all_together_leave_nothing_behind_a_failing_fit(
    order: list[str], failing: type[Blocks]
) -> None:
    found = []
    for names in ([], order):
        model, trainer = build(failing), make_trainer(*map(make, names))
        with pytest.raises(Sabotage, match="of the"):
            trainer.fit(model)
        found.append(traces(model, trainer))
    assert found[1] == found[0]
