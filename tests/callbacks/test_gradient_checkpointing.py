from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import re
import warnings
import weakref
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torchmetrics import MeanMetric

from lightning_memopt import is_recomputing
from lightning_memopt.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memopt.core.saved_tensors import record_saved_tensors
from tests.models import OOM_TEXT, Block, Blocks, make_trainer

STEPS = 6  # of a fit of `Blocks`
EVAL_MODE = r"ignore:Found \d+ module\(s\) in eval mode at the start of training"
BACKEND = "aot_eager_decomp_partition"  # decides what to keep as the default backend does


class Probe(nn.Module):
    """Passes its input on, counts, and keeps in which stage and whether it was a repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.repeated = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.repeated += is_recomputing()
        return x


class Probed(Blocks):
    """Has a probe in each block, and data for training alone unless it is told otherwise."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.linear = nn.Sequential(Probe(), block.linear)

    def counts(self) -> list[tuple[int, int]]:
        return [(m.calls, m.repeated) for m in self.modules() if isinstance(m, Probe)]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def build(model: Any = Probed, **kwargs: Any) -> Any:
    seed(0)
    return model(**kwargs)


def fit(model: Any, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    trainer = make_trainer(*callbacks, **({"limit_val_batches": 0} | kwargs))
    seed(1)
    trainer.fit(model)
    return trainer


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0) -> None:
    assert list(found) == list(expected)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=rtol, atol=rtol, msg=key)


def patched(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.fixture
def lines(caplog):
    """The lines of the callback so far."""
    caplog.set_level(logging.INFO)

    def read():
        found = [record.getMessage() for record in caplog.records]
        return [line for line in found if line.startswith("GradientCheckpointing")]

    return read


def ours(caught: Any) -> list[str]:
    """Return the warnings of the callback among others."""
    return [text for text in map(str, (w.message for w in caught)) if "checkpoint" in text]


# A fit


def test_a_fit_gives_the_weights_and_statistics_of_one_without_to_the_bit(lines):
    plain, model = build(), build()
    fit(plain)
    fit(model, GradientCheckpointing())
    assert plain.counts() == [(STEPS, 0)] * 3
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))
    assert not patched(model)
    assert lines() == ["GradientCheckpointing: checkpointing 3 modules, first blocks.0"]


@pytest.mark.parametrize("keep", ["nothing", "attention", "matmul"])
def test_in_bf16_a_fit_is_as_one_without(keep):
    plain, model = build(), build()
    fit(plain, precision="bf16-mixed")
    fit(model, GradientCheckpointing(keep=keep), precision="bf16-mixed")
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))


def test_validation_test_and_prediction_run_a_block_once_without_a_word():
    plain, model = build(), build()
    for each, callbacks in ((plain, []), (model, [GradientCheckpointing()])):
        trainer = fit(each, *callbacks, limit_val_batches=1.0, num_sanity_val_steps=2)
        trainer.validate(each, verbose=False)
        trainer.test(each, verbose=False)
        trainer.predict(each)
    (calls, _), *_ = plain.counts()
    assert calls == STEPS + 2 + 4 * STEPS
    assert model.counts() == [(calls + STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))


@pytest.mark.parametrize("is_clipped", [False, True])
def test_accumulation_and_clipping_are_as_without(is_clipped):
    kwargs = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1 if is_clipped else None}
    plain, model = build(), build()
    fit(plain, **kwargs)
    fit(model, GradientCheckpointing(), **kwargs)
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))


def test_manual_optimization_with_a_graph_that_is_kept_is_as_without():
    class Manual(Probed):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()

    plain, model = build(Manual), build(Manual)
    fit(plain)
    fit(model, GradientCheckpointing())
    assert model.counts() == [(3 * STEPS, 2 * STEPS)] * 3
    assert_equal(state(model), state(plain))


# Names, types, copies


class TwoNames(Blocks):
    """One of the blocks has a second name, and the optimizer has groups by name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Probe(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.again = self.blocks[0]

    def forward(self, x):
        x = self.stem(x)
        for block in (*self.blocks, self.again):
            x = block(x)
        return self.head(x)

    def configure_optimizers(self):
        named = list(self.named_parameters())
        blocks = [p for name, p in named if name.startswith("blocks.")]
        others = [p for name, p in named if not name.startswith("blocks.")]
        return torch.optim.SGD([{"params": blocks, "lr": 0.1}, {"params": others}], lr=0.01)


class Looker(pl.Callback):
    """Looks at a model in the middle of a step, after its forward."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step != 2:
            return
        self.surface = surface(pl_module)
        groups = trainer.optimizers[0].param_groups
        names = {id(p): name for name, p in pl_module.named_parameters()}
        self.groups = [[names[id(p)] for p in group["params"]] for group in groups]
        self.patched = patched(pl_module)
        self.outputs = []
        for twin in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            self.outputs.append(twin(torch.ones(2, 4)).tolist())
            assert surface(twin) == self.surface


def surface(model):
    modules = model.named_modules(remove_duplicate=False)
    return {
        "modules": {name: type(module) for name, module in modules},
        "parameters": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "keys": list(model.state_dict()),
        "is_shared": model.again is model.blocks[0],
    }


def test_names_types_groups_and_copies_are_those_of_the_plain_model_in_the_midst_of_a_fit():
    looks = []
    for callbacks in ([], [GradientCheckpointing("blocks.*")]):
        looker, model = Looker(), build(TwoNames)
        fit(model, *callbacks, looker)
        looks.append((looker, model))
    (plain, _), (look, model) = looks
    assert (plain.patched, look.patched) == ([], ["blocks.0", "blocks.1"])
    assert look.surface == plain.surface
    assert look.groups == plain.groups
    assert look.groups[0] == [f"blocks.{i}.1.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert look.outputs == [[[0.0], [0.0]]] * 2


def test_a_block_under_two_names_is_recomputed_at_both():
    plain, model = build(TwoNames), build(TwoNames)
    fit(plain)
    fit(model, GradientCheckpointing("blocks.*"))
    probes = [(block[0].calls, block[0].repeated) for block in model.blocks]
    assert probes == [(4 * STEPS, 2 * STEPS), (2 * STEPS, STEPS)]
    assert_equal(state(model), state(plain))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_loads_with_and_without(tmp_path):
    ends = []
    for number, callbacks in enumerate(([], [GradientCheckpointing()])):
        model = build()
        path = tmp_path / f"{number}.ckpt"
        fit(model, *callbacks).save_checkpoint(path)
        stored = torch.load(path, weights_only=True)["state_dict"]
        assert_equal(stored, state(model))
        for others in ([], [GradientCheckpointing()]):
            resumed = build()
            trainer = make_trainer(*others, max_epochs=2, limit_val_batches=0)
            seed(2)
            trainer.fit(resumed, ckpt_path=path)
            assert resumed.counts()[0] == ((2 * STEPS, STEPS) if others else (STEPS, 0))
            ends.append(state(resumed))
    for end in ends[1:]:
        assert_equal(end, ends[0])


# Frozen layers and layers in eval mode


class Backbone(Probed):
    """Freezes what is named in `frozen`, before the optimizer is made."""

    frozen: tuple[str, ...] = ()

    def __init__(self):
        super().__init__()
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.01)


def freezing(*names):
    return type("Frozen", (Backbone,), {"frozen": names})


def test_with_a_frozen_stem_and_an_input_without_gradients_all_blocks_are_recomputed(lines):
    plain, model = build(freezing("stem")), build(freezing("stem"))
    fit(plain)
    fit(model, GradientCheckpointing())
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))
    assert lines() == ["GradientCheckpointing: checkpointing 3 modules, first blocks.0"]


def test_a_frozen_block_in_the_stem_is_listed_as_skipped(lines):
    kind = freezing("stem", "blocks.0", "blocks.1")
    plain, model = build(kind), build(kind)
    fit(plain)
    with pytest.warns(UserWarning, match=r"is one segment, `blocks\.2`"):
        fit(model, GradientCheckpointing())
    assert model.counts() == [(STEPS, 0), (STEPS, 0), (2 * STEPS, STEPS)]
    assert_equal(state(model), state(plain))
    assert lines() == [
        "GradientCheckpointing: checkpointing 1 modules, first blocks.2"
        "; skipping frozen blocks.0, blocks.1"
    ]


def test_a_frozen_block_after_trainable_ones_is_recomputed(lines):
    plain, model = build(freezing("blocks.1")), build(freezing("blocks.1"))
    fit(plain)
    fit(model, GradientCheckpointing())
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))
    assert lines() == ["GradientCheckpointing: checkpointing 3 modules, first blocks.0"]


def test_where_only_the_head_is_trained_a_warning_says_that_there_is_nothing_to_do(lines):
    model = build(freezing("stem", "blocks"))
    with pytest.warns(UserWarning, match=r"`layers='auto'` are all frozen.*nothing is recomputed"):
        fit(model, GradientCheckpointing())
    assert model.counts() == [(STEPS, 0)] * 3
    assert lines() == [
        "GradientCheckpointing: checkpointing 0 modules"
        "; skipping frozen blocks.0, blocks.1, blocks.2"
    ]


def test_frozen_blocks_behind_a_prompt_that_is_registered_later_are_recomputed():
    class Prompted(freezing("stem", "blocks", "head")):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Linear(1, 4)

        def forward(self, x):
            return super().forward(x + self.prompt.weight.T)

    plain, model = build(Prompted), build(Prompted)
    fit(plain)
    with pytest.warns(UserWarning, match="unless their input needs gradients"):
        fit(model, GradientCheckpointing())
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))
    assert not torch.equal(model.prompt.weight, build(Prompted).prompt.weight)


def test_layers_that_are_unfrozen_while_training_runs_are_recomputed_from_then_on():
    class Thawing(freezing("stem", "blocks.0")):
        def on_train_batch_start(self, batch, batch_idx):
            self.requires_grad_(batch_idx >= 3)
            self.head.requires_grad_(True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    plain, model = build(Thawing), build(Thawing)
    fit(plain)
    fit(model, GradientCheckpointing())
    assert model.counts() == [(STEPS + 3, 3)] * 3
    assert_equal(state(model), state(plain))


def test_a_backbone_in_eval_mode_with_trainable_weights_is_recomputed():
    class InEval(Probed):
        def on_train_epoch_start(self):
            self.blocks.eval()

    plain, model = build(InEval), build(InEval)
    fit(plain)
    fit(model, GradientCheckpointing())
    assert not model.blocks.training
    assert model.counts() == [(2 * STEPS, STEPS)] * 3
    assert_equal(state(model), state(plain))


# A model with a switch of its own


class Library(nn.Module):
    """Checkpoints its layers itself, in training mode, as a library's model does."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(nn.Sequential(Probe(), Block()) for _ in range(2))

    def gradient_checkpointing_enable(self):
        self.gradient_checkpointing = True

    def forward(self, x):
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


class WithLibrary(Probed):
    """Puts the library's model in eval mode in the hook that is named."""

    def __init__(self, hook=None):
        super().__init__()
        self.net = Library()
        self.net.gradient_checkpointing_enable()
        if hook is not None:
            setattr(self, hook, self.put_in_eval_mode)

    def put_in_eval_mode(self):
        self.net.eval()

    def forward(self, x):
        return self.head(self.net(self.stem(x)))


def test_layers_whose_own_checkpointing_is_on_are_left_to_it_with_a_warning(lines):
    model = build(WithLibrary)
    with pytest.warns(
        UserWarning, match=r"`net` has its own gradient checkpointing.*left to it"
    ) as caught:
        fit(model, GradientCheckpointing("net.layers.*"))
    assert len(ours(caught)) == 1
    probes = [(layer[0].calls, layer[0].repeated) for layer in model.net.layers]
    assert probes == [(2 * STEPS, 0)] * 2  # by itself
    assert lines() == ["GradientCheckpointing: checkpointing 0 modules"]


INACTIVE = r"`net` has.*built-in checkpointing is inactive because the module is in eval mode"


@pytest.mark.filterwarnings(EVAL_MODE)
def test_in_eval_mode_a_warning_says_that_its_own_checkpointing_is_inactive_and_ours_works(lines):
    plain, model = build(WithLibrary), build(WithLibrary)
    plain.net.eval()
    model.net.eval()
    fit(plain)
    with pytest.warns(UserWarning, match=INACTIVE) as caught:
        fit(model, GradientCheckpointing("net.layers.*"))
    assert len(ours(caught)) == 1
    probes = [(layer[0].calls, layer[0].repeated) for layer in model.net.layers]
    assert probes == [(2 * STEPS, STEPS)] * 2
    assert_equal(state(model), state(plain))
    assert lines() == ["GradientCheckpointing: checkpointing 2 modules, first net.layers.0"]


@pytest.mark.filterwarnings(EVAL_MODE, "ignore:`net` has its own.*left to it")
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_so_it_is_when_a_hook_of_the_model_puts_it_in_eval_mode(hook, lines):
    plain, model = build(WithLibrary, hook=hook), build(WithLibrary, hook=hook)
    fit(plain)
    with pytest.warns(UserWarning, match=INACTIVE):
        fit(model, GradientCheckpointing("net.layers.*"))
    probes = [(layer[0].calls, layer[0].repeated) for layer in model.net.layers]
    assert probes == [(2 * STEPS, STEPS)] * 2
    assert_equal(state(model), state(plain))
    assert lines()[-1] == "GradientCheckpointing: checkpointing 2 modules, first net.layers.0"
    assert not patched(model)


def test_layers_beside_those_are_still_checkpointed(lines):
    model = build(WithLibrary)
    with pytest.warns(UserWarning, match="left to it"):
        fit(model, GradientCheckpointing(["net.layers.*", "blocks.*"]))
    assert lines() == ["GradientCheckpointing: checkpointing 3 modules, first blocks.0"]


class Language(pl.LightningModule):
    """A model of transformers with its cache on, and its own switch."""

    def __init__(self, is_on=False, is_training=True):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
        config.bos_token_id = config.eos_token_id = 0
        self.net = GPT2LMHeadModel(config).train(is_training)
        self.runs = 0
        self.net.transformer.h[1].ln_1.register_forward_pre_hook(self.count)
        if is_on:
            # Its name in transformers from 5.2x on.
            enable = getattr(self.net, "activation_checkpointing_enable", None)
            (enable or self.net.gradient_checkpointing_enable)()

    def count(self, *_):
        self.runs += 1

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        tokens = torch.randint(1, 50, (4, 8), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(tokens, batch_size=2)


library_warnings = pytest.mark.filterwarnings(
    "ignore:`use_cache=True` is incompatible",
    "ignore:`past_key_values` is deprecated",
    EVAL_MODE,
)


@library_warnings
@pytest.mark.filterwarnings("ignore:Hooks and metrics in checkpointed layers")
def test_a_model_of_transformers_is_as_without():
    plain, model = build(Language), build(Language)
    fit(plain)
    fit(model, GradientCheckpointing())
    assert (plain.runs, model.runs) == (2, 4)
    assert_equal(state(model), state(plain), rtol=1e-5)


@library_warnings
def test_a_model_of_transformers_that_checkpoints_by_itself_is_left_to_it_with_one_warning(lines):
    plain, model = build(Language), build(Language, is_on=True)
    fit(plain)
    with pytest.warns(UserWarning, match=r"`net\.transformer` has its own.*left to it") as caught:
        fit(model, GradientCheckpointing())
    assert len(ours(caught)) == 1
    assert (plain.runs, model.runs) == (2, 4)
    assert_equal(state(model), state(plain), rtol=1e-5)
    assert lines() == ["GradientCheckpointing: checkpointing 0 modules"]


@library_warnings
@pytest.mark.filterwarnings("ignore:Hooks and metrics in checkpointed layers")
def test_a_model_of_transformers_in_eval_mode_is_checkpointed_by_us_with_a_warning(lines):
    plain = build(Language, is_training=False)
    model = build(Language, is_training=False, is_on=True)
    fit(plain)
    with pytest.warns(UserWarning, match=r"`net\.transformer` has.*inactive because the module"):
        fit(model, GradientCheckpointing())
    assert (plain.runs, model.runs) == (2, 4)
    assert_equal(state(model), state(plain), rtol=1e-5)
    assert lines() == ["GradientCheckpointing: checkpointing 3 modules, first net.transformer.h.0"]


# Blocks that don't repeat themselves


class Odd(nn.Module):
    """A block that differs between its runs in the way that is named."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.probe, self.flag = nn.Linear(8, 8), kind, Probe(), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.probe(x)
        match self.kind:
            case "dropout":
                return nn.functional.dropout(self.linear(x), 0.5).tanh()
            case "random branch":
                return self.linear(x).tanh() if random.random() < 0.5 else self.linear(x).cos() * x
            case "numpy noise":
                noise = torch.from_numpy(numpy.random.rand(*x.shape)).to(x)
                return (self.linear(x) * noise).tanh()
            case "counter":
                return self.linear(x)[:, : 8 - self.probe.calls % 2].tanh().mean(1, keepdim=True)
            case "mode":
                return nn.functional.dropout(self.linear(x), 0.5, self.training).tanh()
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16, enabled=self.flag):
                    return self.linear(x).tanh().float()
            case _:
                raise ValueError(self.kind)


class OddModel(Blocks):
    def __init__(self, kind: str, n: int = 24) -> None:
        super().__init__(n=n)
        self.net = nn.ModuleDict({"odd": Odd(kind)})

    def training_step(self, batch, batch_idx):
        odd = self.net["odd"]
        y = odd(self.stem(batch[0]))
        if odd.kind == "mode":
            odd.eval()
        odd.flag = False
        return y.square().mean() + self.head.weight.sum()


one_segment = pytest.mark.filterwarnings("ignore:.*is one segment")


@one_segment
@pytest.mark.parametrize("kind", ["dropout", "random branch", "numpy noise"])
def test_a_random_block_is_as_without_in_twelve_repeats(kind):
    plain, model = build(OddModel, kind=kind, n=48), build(OddModel, kind=kind, n=48)
    fit(plain)
    fit(model, GradientCheckpointing("net.odd"))
    probe = model.net["odd"].probe
    assert (probe.calls, probe.repeated) == (24, 12)
    assert_equal(state(model), state(plain))


@one_segment
@pytest.mark.parametrize("kind", ["counter", "mode", "autocast"])
def test_a_block_that_does_not_repeat_itself_is_one_error_with_its_name_and_what_to_do(kind):
    fit(build(OddModel, kind=kind))  # without, it trains
    model = build(OddModel, kind=kind)
    with pytest.raises(RuntimeError, match=r"^`net\.odd` did not repeat itself") as caught:
        fit(model, GradientCheckpointing("net.odd"))
    text = str(caught.value)
    assert "leave it out of `layers`" in text
    assert text.count("net.odd") == 1
    assert "\n" not in text
    assert model.net["odd"].probe.repeated == 1
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert not patched(model)
    assert not is_recomputing()


@one_segment
def test_an_input_that_is_changed_in_place_is_an_error_with_the_name_of_the_block():
    class InPlace(Probed):
        def __init__(self):
            super().__init__()
            self.blocks[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    fit(build(InPlace))
    with pytest.raises(RuntimeError, match=r"^`blocks\.1` changes its input in place.*leave it"):
        fit(build(InPlace), GradientCheckpointing("blocks.1"))


@pytest.mark.parametrize("error", [RuntimeError(OOM_TEXT), MemoryError("host")])
def test_out_of_memory_in_a_repetition_reaches_the_user_as_it_is(error):
    class Failing(Probe):
        def forward(self, x):
            if is_recomputing():
                raise error
            return x

    model = build(Blocks)
    model.blocks[1].norm = Failing()
    with pytest.raises(type(error), match=str(error)) as caught:
        fit(model, GradientCheckpointing())
    assert caught.value is error
    assert not patched(model)
    assert not is_recomputing()


def test_another_error_of_a_checkpoint_that_is_not_ours_is_left_alone():
    callback, model = GradientCheckpointing(), build(Blocks)
    trainer = fit(model, callback)
    error = ValueError("different metadata")
    callback.on_exception(trainer, model, error)
    assert error.args == ("different metadata",)


# Choosing layers


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ({}, "111111"),
        ({"every": 2}, "101010"),
        ({"every": 4}, "100010"),
        ({"skip_last": True}, "111110"),
        ({"every": 2, "skip_last": True}, "101010"),
        ({"layers": ["blocks.4", "blocks.1"]}, "010010"),
        ({"layers": "Block", "every": 5}, "100001"),
        ({"layers": "Block", "every": 5, "skip_last": True}, "100000"),
    ],
    ids=str,
)
@one_segment
def test_exactly_the_chosen_layers_are_recomputed(arguments, chosen, lines):
    class Six(Probed):
        def __init__(self):
            super().__init__()
            self.blocks.extend(Probed().blocks)

    plain, model = build(Six), build(Six)
    fit(plain)
    fit(model, GradientCheckpointing(**arguments))
    repeated = [repeated for _, repeated in model.counts()]
    assert repeated == [STEPS * int(is_chosen) for is_chosen in chosen]
    assert_equal(state(model), state(plain))
    count, first = chosen.count("1"), chosen.index("1")
    assert lines() == [
        f"GradientCheckpointing: checkpointing {count} modules, first blocks.{first}"
    ]


def test_checkpointing_more_layers_keeps_less_for_backward():
    found = []

    class Recording(Blocks):
        def training_step(self, batch, batch_idx):
            with record_saved_tensors(self) as saved:
                loss = super().training_step(batch, batch_idx)
            found.append(saved.total_bytes)
            return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is one segment")
        fit(build(Recording), limit_train_batches=1)
        for arguments in ({"every": 3}, {"every": 2}, {}):
            fit(build(Recording), GradientCheckpointing(**arguments), limit_train_batches=1)
    # A block keeps more than its input: what the norm keeps (its input, mean and deviation), the
    # relu its output, and the dropout a mask.
    unit = 4 * 4 * 8
    inside = unit + 2 * 4 * 8 + unit + unit
    assert [more - less for more, less in pairwise(found)] == [inside] * 3


def test_an_unknown_layer_is_an_error_with_the_names_of_the_children():
    model = build()
    with pytest.raises(
        MisconfigurationException, match=r"'encoder\.\*'.*the children stem, blocks, head"
    ):
        fit(model, GradientCheckpointing("encoder.*"))
    with pytest.raises(MisconfigurationException, match=r"'blocks\.7'.*the children 0, 1, 2"):
        fit(model, GradientCheckpointing("blocks.7"))
    assert model.counts() == [(0, 0)] * 3
    assert not patched(model)


@one_segment
def test_arguments_that_leave_no_layer_are_an_error():
    with pytest.raises(MisconfigurationException, match=r"`skip_last=True` leave nothing to"):
        fit(build(), GradientCheckpointing("blocks.1", skip_last=True))


def test_one_layer_that_is_the_whole_model_is_warned_of():
    with pytest.warns(UserWarning, match=r"`layers='blocks\.1'` is one segment, `blocks\.1`"):
        fit(build(), GradientCheckpointing("blocks.1"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"layers": []}, ValueError, "`layers`"),
        ({"layers": ""}, ValueError, "`layers`"),
        ({"layers": 3}, TypeError, "`layers`"),
        ({"layers": ["blocks.*", 3]}, TypeError, "`layers`"),
        ({"every": 0}, ValueError, "`every`"),
        ({"every": -1}, ValueError, "`every`"),
        ({"every": 1.5}, TypeError, "`every`"),
        ({"every": True}, TypeError, "`every`"),
        ({"skip_last": 1}, TypeError, "`skip_last`"),
        ({"keep": "all"}, ValueError, "`keep`"),
        ({"keep": None}, (TypeError, ValueError), "`keep`"),
    ],
    ids=str,
)
def test_a_bad_argument_is_one_line_that_names_it_and_what_was_given(arguments, error, text):
    (value,) = arguments.values()
    with pytest.raises(error, match=rf"^{text}[^\n]*$") as caught:
        GradientCheckpointing(**arguments)
    shown = repr(value[1] if isinstance(value, list) and value else value)
    assert shown in str(caught.value)


def test_arguments_are_stored_under_their_names():
    callback = GradientCheckpointing(["a", "b"], 2, True, "matmul")
    assert (callback.layers, callback.every, callback.skip_last, callback.keep) == (
        ["a", "b"],
        2,
        True,
        "matmul",
    )


def test_two_of_them_are_an_error():
    model = build()
    with pytest.raises(
        MisconfigurationException, match="`GradientCheckpointing` and `GradientCheckpointing` both"
    ):
        fit(model, GradientCheckpointing(), GradientCheckpointing("blocks.1"))
    assert not patched(model)


def test_layers_of_configure_model_are_found():
    class Late(Probed):
        def __init__(self):
            super().__init__()
            self.late = None

        def configure_model(self):
            if self.late is None:
                self.late = nn.ModuleList(nn.Sequential(Probe(), Block()) for _ in range(2))

        def forward(self, x):
            x = self.stem(x)
            for block in self.late:
                x = block(x)
            return self.head(x)

    plain, model = build(Late), build(Late)
    fit(plain)
    fit(model, GradientCheckpointing("late.*"))
    assert [(block[0].calls, block[0].repeated) for block in model.late] == [(2 * STEPS, STEPS)] * 2
    assert_equal(state(model), state(plain))


# Switching on and off


class Switching(Probed):
    """Switches a callback in the midst of the steps that are named."""

    def __init__(self, callback, off=(), on=()):
        super().__init__()
        self.callback, self.off, self.on = [callback], off, on
        self.repeated = []

    def training_step(self, batch, batch_idx):
        self.repeated.append(self.counts()[0][1])
        if batch_idx in self.off:
            self.callback[0].disable()
        if batch_idx in self.on:
            self.callback[0].enable()
        return super().training_step(batch, batch_idx)


def test_it_is_switched_on_and_off_from_the_next_step_and_says_so_each_time(lines):
    callback = GradientCheckpointing()
    plain, model = build(), build(Switching, callback=callback, off=(1,), on=(3,))
    fit(plain)
    fit(model, callback)
    totals = [*model.repeated, model.counts()[0][1]]
    steps = [after - before for before, after in pairwise(totals)]
    assert steps == [1, 1, 0, 0, 1, 1]
    assert_equal(state(model), state(plain))
    assert not patched(model)
    assert lines()[1:] == [
        "GradientCheckpointing: off from step 2",
        "GradientCheckpointing: on from step 4",
    ]


def test_asking_for_what_it_is_already_says_nothing(lines):
    callback = GradientCheckpointing()
    model = build(Switching, callback=callback, on=(1, 2))
    fit(model, callback)
    assert model.counts()[0] == (2 * STEPS, STEPS)
    assert len(lines()) == 1


def test_what_is_switched_off_before_the_fit_is_switched_on_in_it():
    callback = GradientCheckpointing()
    callback.disable()
    model = build(Switching, callback=callback, on=(3,))
    fit(model, callback)
    assert model.counts() == [(STEPS + 2, 2)] * 3
    assert not patched(model)


# Hooks and metrics inside a block


class Metered(Probed):
    def __init__(self):
        super().__init__()
        self.blocks[1].mean = MeanMetric()
        self.blocks[1].register_forward_hook(self.measure)
        self.blocks[2].norm.register_forward_hook(self.count)
        self.seen = self.asked = 0

    def measure(self, module, args, output):
        module.mean.update(output.detach().mean())

    def count(self, *_):
        self.seen += 1
        self.asked += not is_recomputing()


def test_hooks_and_metrics_in_a_block_are_warned_of_by_name_and_count_once_if_they_ask():
    plain, model = build(Metered), build(Metered)
    fit(plain)
    with pytest.warns(
        UserWarning, match=r"run twice a step: blocks\.1\.mean, blocks\.2\.norm;.*is_recomputing"
    ) as caught:
        fit(model, GradientCheckpointing())
    assert len(ours(caught)) == 1
    assert (plain.seen, model.seen) == (STEPS, 2 * STEPS)
    assert (plain.asked, model.asked) == (STEPS, STEPS)
    # The block's own hook runs once.
    assert model.blocks[1].mean.update_count == plain.blocks[1].mean.update_count == STEPS
    assert torch.equal(model.blocks[1].mean.compute(), plain.blocks[1].mean.compute())


def test_hooks_in_blocks_that_are_not_chosen_are_not_warned_of():
    model = build(Metered)
    fit(model, GradientCheckpointing(["blocks.0", "stem"]))
    assert model.seen == STEPS


# Compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["whole", "submodule", "blocks"])
def test_a_compiled_model_trains_as_without_and_keeps_less(how, lines):
    kept = []

    class Recorder(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            self.context = record_saved_tensors(pl_module)
            self.saved = self.context.__enter__()

        def on_before_backward(self, *_):
            self.context.__exit__(None, None, None)
            kept.append(self.saved.total_bytes)

    class Compiled(Blocks):
        def __init__(self):
            super().__init__(n=1024, batch_size=512)  # more than the random state, which is kept
            if how == "submodule":
                self.blocks[0] = torch.compile(nn.Sequential(*self.blocks), backend=BACKEND)
                del self.blocks[1:]
            elif how == "blocks":
                for block in self.blocks:
                    block.compile(backend=BACKEND)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    ends = []
    for callbacks in ([], [GradientCheckpointing()]):
        torch.compiler.reset()  # what other tests compiled counts towards a limit
        model = build(Compiled)
        fitted = model
        if how == "whole":
            fitted = torch.compile(model, backend=BACKEND)
        trainer = make_trainer(*callbacks, Recorder(), limit_val_batches=0)
        seed(1)
        trainer.fit(fitted)
        ends.append(state(model))
    assert_equal(ends[1], ends[0])
    assert not torch.equal(ends[0]["stem.weight"], build(Compiled).stem.weight)
    assert len(kept) == 4
    assert max(kept[2:]) < min(kept[:2])
    assert lines() == [
        "GradientCheckpointing: checkpointing 3 modules, first "
        + ("blocks.0._orig_mod.0" if how == "submodule" else "blocks.0")
    ]


# A fit that fails


class Failing(Probed):
    """Runs out of memory in the third step, with a tensor in hand."""

    def __init__(self, is_failing=True):
        super().__init__()
        self.is_failing = is_failing

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.is_failing:
            held = torch.ones(1000)
            self.held = weakref.ref(held)
            raise RuntimeError(OOM_TEXT)
        return loss


def test_a_fit_that_fails_is_cleaned_up_and_a_second_one_is_as_a_first():
    callback, model = GradientCheckpointing(), build(Failing)
    trainer = make_trainer(callback, limit_val_batches=0)
    seed(1)
    with pytest.raises(RuntimeError, match=f"^{re.escape(OOM_TEXT)}$") as caught:
        trainer.fit(model)
    assert type(caught.value) is RuntimeError
    assert caught.traceback[-1].name == "training_step"
    assert model.counts() == [(5, 2)] * 3
    assert not patched(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not is_recomputing()
    assert model.held() is not None
    del caught
    gc.collect()
    assert model.held() is None
    callback.on_exception(trainer, model, RuntimeError("again"))
    callback.teardown(trainer, model, "fit")
    assert not patched(model)

    fresh = build(Failing, is_failing=False)
    model.load_state_dict(fresh.state_dict())
    model.is_failing = False
    before = model.counts()[0]
    fit(model, callback)
    fit(fresh, GradientCheckpointing())
    assert model.counts()[0] == (before[0] + 2 * STEPS, before[1] + STEPS)
    assert_equal(state(model), state(fresh))


def test_a_fit_that_fails_in_a_repetition_is_cleaned_up():
    model = build()
    model.blocks[1].dropout = Odd("counter")
    with pytest.raises(CheckpointError, match=r"^`blocks\.1` did not repeat itself"):
        fit(model, GradientCheckpointing())
    assert model.counts() == [(1, 0), (2, 1), (2, 1), (2, 1)]  # one of `Odd` too
    assert not patched(model)
    assert not is_recomputing()


def test_a_fit_that_fails_before_it_starts_is_cleaned_up():
    class Early(Probed):
        def on_train_start(self):
            raise ValueError("too early")

    model = build(Early)
    with pytest.raises(ValueError, match="too early"):
        fit(model, GradientCheckpointing())
    assert not patched(model)
