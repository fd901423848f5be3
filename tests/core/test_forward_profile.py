"""A forward in numbers, and plans from it: what they keep is as predicted, to the byte."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.core.forward_profile import profile_forward
from lightning_memopt.core.planner import BudgetError, plan_recompute
from lightning_memopt.core.recompute_candidates import Problem
from lightning_memopt.core.recompute_choice import Choice
from lightning_memopt.core.saved_tensors import record_saved_tensors
from lightning_memopt.core.segments import checkpoint_segments
from lightning_memopt.core.step_profile import StepProfile
from tests.core.test_recompute import (
    TEXTS,
    assert_equal,
    densenet,
    make_text_model,
    mobilenet,
    resnet,
    seed,
    state,
    swin,
    vit,
)

CPU = torch.device("cpu")


def torchvision_model(name: str, **kwargs: Any) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, num_classes=4, **kwargs)


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "vit": vit,
    "swin": swin,
    "densenet": densenet,
    "mobilenet": mobilenet,
    "efficientnet": lambda: torchvision_model("efficientnet_b0"),
    "convnext": lambda: torchvision_model("convnext_tiny"),
    "regnet": lambda: torchvision_model("regnet_y_400mf"),
    "shufflenet": lambda: torchvision_model("shufflenet_v2_x0_5"),
    "squeezenet": lambda: torchvision_model("squeezenet1_1"),
    "mnasnet": lambda: torchvision_model("mnasnet0_5"),
}
MODELS = [*IMAGES, *TEXTS]


def make(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], Tensor]:
    """Return a model, what computes its loss, and its batch."""
    seed(0)
    if name in IMAGES:
        images = torch.randn(2, 3, 32, 32)
        return IMAGES[name]().train(), lambda model: model(images).square().sum(), images
    model = make_text_model(name)
    model.config.use_cache = False
    tokens = torch.randint(1, 50, (2, 8))
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss, tokens


def profile_of(model: nn.Module, loss: Callable[[nn.Module], Tensor], batch: Tensor) -> StepProfile:
    copied = copy.deepcopy(model)
    seed(1)
    return profile_forward(copied, lambda: loss(copied), CPU, [batch])


def kept_bytes(model: nn.Module, loss: Callable[[nn.Module], Tensor], batch: Tensor) -> int:
    seed(1)
    with record_saved_tensors(copied := copy.deepcopy(model)) as saved:
        loss(copied)
    return saved.total_bytes - saved.storages.get(batch.untyped_storage().data_ptr(), 0)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        warnings.filterwarnings("error", message=".*runs as if it were not checkpointed")
        yield


def random_segments(problem: Problem, rng: random.Random) -> Choice:
    choice = Choice(problem)
    for number in rng.sample(range(len(problem.candidates)), len(problem.candidates)):
        if not choice.overlapping(number):
            choice.add(number)
    return choice


def segments_of(profile: StepProfile, choice: Choice) -> list[list[str]]:
    candidates = Problem(profile).candidates
    return [[profile.calls[c].name for c in candidates[n].calls] for n in sorted(choice.chosen)]


@pytest.mark.parametrize("name", MODELS)
def test_random_plans_train_to_the_bit_and_keep_what_was_predicted(name: str) -> None:
    model, loss, batch = make(name)
    profile = profile_of(model, loss, batch)
    problem = Problem(profile)
    assert Choice(problem).kept == kept_bytes(model, loss, batch)
    plain = copy.deepcopy(model)
    seed(1)
    loss(plain).backward()
    for number in range(3):
        choice = random_segments(problem, random.Random(number))
        planned = copy.deepcopy(model)
        undo = checkpoint_segments(planned, segments_of(profile, choice))
        seed(1)
        with record_saved_tensors(planned) as saved:
            found = loss(planned)
        kept = saved.total_bytes - saved.storages.get(batch.untyped_storage().data_ptr(), 0)
        assert kept == choice.kept
        del saved
        found.backward()
        assert_equal(state(planned), state(plain))
        undo()


@pytest.mark.parametrize("name", MODELS)
def test_half_of_what_is_kept_can_be_planned(name: str) -> None:
    model, loss, batch = make(name)
    profile = profile_of(model, loss, batch)
    plain = Choice(Problem(profile)).kept
    budget = plain // 2
    try:
        plan_recompute(profile, budget)
    except BudgetError as error:
        budget = error.least
    plan = plan_recompute(profile, budget)
    assert plan.segments
    assert plan.kept < plain


# What is seen


class Varied(nn.Module):
    """Calls modules in a row, beside each other, twice, and with what it has changed."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "beside", "twice", "late"):
            setattr(self, name, nn.Linear(4, 4))
        self.tanh, self.relu = nn.Tanh(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        z = self.relu(self.beside(y.sin()))
        y = self.twice(self.twice(y)) + z
        y = self.tanh(y)
        y.add_(1)
        return self.late(y)


def varied() -> tuple[StepProfile, Varied]:
    model = Varied()
    x = torch.ones(8, 4)
    return profile_forward(model, lambda: model(x), CPU, [x]), model


def test_modules_in_a_row_follow_and_no_others() -> None:
    profile, _ = varied()
    assert [call.name for call in profile.calls] == [
        *("first", "second", "beside", "relu", "tanh", "late")
    ]
    assert [call.name for call in profile.calls if call.follows] == ["second", "relu"]
    assert [call.name for call in profile.calls if call.changes] == ["relu"]
    segments = {
        tuple(profile.calls[call].name for call in each.calls)
        for each in Problem(profile).candidates
    }
    assert ("relu",) not in segments
    assert ("beside", "relu") in segments


def test_nothing_stays_on_the_model_and_nothing_is_kept() -> None:
    profile, model = varied()
    assert not any("forward" in vars(module) for module in model.modules())
    batch = torch.ones(8, 4)
    batch_alone = profile_forward(model, lambda: model(batch), CPU, [batch])
    assert batch_alone.sizes == profile.sizes
    assert profile.saves[0].storage is None  # the batch, which is there anyway
    assert all(save.seconds >= 0 for save in profile.saves)


def test_a_backward_in_a_forward_is_refused_and_nothing_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(RuntimeError, match="a backward runs within the forward"):
        profile_forward(model, lambda: model(torch.ones(2, 4)).sum().backward(), CPU)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_module_with_a_cache_begins_no_segment() -> None:
    model = make_text_model("GPT2LMHeadModel")
    tokens = torch.randint(1, 50, (2, 8))
    profile = profile_forward(model, lambda: model(input_ids=tokens, use_cache=True), CPU, [tokens])
    by_name = {call.name: call for call in profile.calls}
    assert not by_name["transformer.h.1"].can_begin
    assert by_name["transformer.h.1.mlp"].can_begin
