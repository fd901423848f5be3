import functools

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_memopt.core.side_effects import (
    counting_twice,
    is_frozen_stem,
    normalising_over_batch,
    own_checkpointing,
)


class Metered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean = MeanMetric()


class Library(nn.Module):
    """Has a switch as the models of transformers have it."""

    def __init__(self, is_on=False):
        super().__init__()
        self.gradient_checkpointing = is_on
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def hook(*_):
    return None


@pytest.fixture
def model():
    return nn.ModuleDict(
        {
            "stem": nn.Linear(4, 4),
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)),
            "head": nn.Linear(4, 4),
        }
    )


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


# Hooks and metrics


def test_a_model_without_hooks_and_metrics_counts_nothing_twice(model):
    assert counting_twice(model, BLOCKS) == []


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_modules_with_hooks_inside_blocks_are_named_and_others_not(model, register):
    getattr(model["stem"], register)(hook)
    getattr(model["blocks"][0], register)(hook)  # the block's own run once
    getattr(model["blocks"][0][1], register)(hook)
    getattr(model["blocks"][2][0], register)(functools.partial(hook, 1))
    assert counting_twice(model, BLOCKS[:2]) == ["blocks.0.1"]
    assert counting_twice(model, BLOCKS) == ["blocks.0.1", "blocks.2.0"]


def test_a_hook_that_was_removed_is_not_named(model):
    model["blocks"][0][0].register_forward_hook(hook).remove()
    assert counting_twice(model, BLOCKS) == []


def test_hooks_of_pytorchs_own_reparametrizations_are_not_named():
    block = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
    assert len(block[0]._forward_pre_hooks) == 1
    assert counting_twice(nn.Sequential(block), ["0"]) == []


def test_metrics_inside_blocks_are_named():
    model = nn.ModuleDict({"block": Metered(), "mean": MeanMetric()})
    assert counting_twice(model, ["block"]) == ["block.mean"]


def test_a_hook_on_the_whole_model_as_a_block_is_its_own(model):
    model.register_forward_hook(hook)
    model["head"].register_forward_hook(hook)
    assert counting_twice(nn.ModuleDict({"all": model}), ["all"]) == ["all.head"]


# A switch of the model's own


def test_no_model_has_a_switch_that_is_off(model):
    assert own_checkpointing(model) == {}
    assert own_checkpointing(Library()) == {}
    assert own_checkpointing(nn.Sequential(Library())) == {}


@pytest.mark.parametrize("is_training", [True, False])
def test_a_switch_that_is_on_is_found_with_the_mode_that_decides(is_training):
    model = nn.Sequential(nn.Linear(4, 4), Library(is_on=True).train(is_training))
    assert own_checkpointing(model) == {"1": is_training}
    assert own_checkpointing(model[1]) == {"": is_training}


def test_of_nested_switches_the_outermost_is_named():
    outer = Library(is_on=True)
    outer.layers.append(Library(is_on=True))
    model = nn.ModuleDict({"net": outer, "net_b": Library(is_on=True).eval()})
    assert own_checkpointing(model) == {"net": True, "net_b": False}


@pytest.mark.parametrize("value", [1, "yes", None, torch.tensor(True)])
def test_an_attribute_that_only_looks_like_a_switch_is_none(value):
    model = Library()
    model.gradient_checkpointing = value
    assert own_checkpointing(model) == {}


# Frozen stems


def frozen_names(model, names=BLOCKS):
    return [name for name in names if is_frozen_stem(model, name)]


def test_nothing_is_frozen_by_default(model):
    assert frozen_names(model) == []


def test_blocks_are_a_stem_up_to_the_first_trainable_parameter(model):
    model["stem"].requires_grad_(False)
    model["blocks"].requires_grad_(False)
    model["blocks"][1][0].bias.requires_grad_(True)
    assert frozen_names(model) == ["blocks.0"]


def test_a_frozen_block_after_a_trainable_one_is_no_stem(model):
    model["blocks"][1].requires_grad_(False)
    assert frozen_names(model) == []


def test_a_trainable_stem_makes_every_block_kept(model):
    model.requires_grad_(False)
    model["stem"].bias.requires_grad_(True)
    assert frozen_names(model) == []


def test_a_model_that_is_frozen_but_for_its_head_is_all_stem(model):
    model.requires_grad_(False)
    model["head"].requires_grad_(True)
    assert frozen_names(model) == BLOCKS


def test_a_block_without_parameters_is_a_stem_only_before_the_first_trainable_one(model):
    model["stem"].requires_grad_(False)
    assert frozen_names(model, ["blocks.0.1", "blocks.2.1"]) == []
    model["blocks"][0].requires_grad_(False)
    assert frozen_names(model, ["blocks.0.1", "blocks.2.1"]) == ["blocks.0.1"]


def test_a_parameter_of_the_model_itself_comes_first(model):
    model.requires_grad_(False)
    model.register_parameter("token", nn.Parameter(torch.zeros(4)))
    assert frozen_names(model) == []
    model.get_parameter("token").requires_grad_(False)
    assert frozen_names(model) == BLOCKS


def test_a_block_whose_weights_are_shared_with_an_earlier_one_is_a_stem_with_it(model):
    model.requires_grad_(False)
    model["blocks"][1][0].weight = model["blocks"][0][0].weight
    model["blocks"][1][0].bias = model["blocks"][0][0].bias
    model["blocks"][2].requires_grad_(True)
    assert frozen_names(model) == ["blocks.0", "blocks.1"]


def test_modules_that_normalise_over_the_batch_are_named():
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.LayerNorm(3),
        nn.BatchNorm1d(3).eval(),
        nn.BatchNorm1d(3, track_running_stats=False).eval(),
        nn.Sequential(nn.SyncBatchNorm(3)),
        nn.GroupNorm(1, 3),
    )
    assert normalising_over_batch(model) == ["0", "3", "4.0"]
