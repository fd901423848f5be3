from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memopt.core.weights import WindowWeights, correct, weigher


def tokens(batch):
    return batch["tokens"]


not_a_function = 3


def test_words_and_functions_and_names_weigh():
    assert weigher("samples")(torch.zeros(5, 2)) == 5
    assert weigher("batches")(torch.zeros(5, 2)) == 1
    assert weigher(tokens)({"tokens": 7}) == 7
    assert weigher(f"{__name__}.tokens")({"tokens": 7}) == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module.f", "no_such_module"),
        (f"{__name__}.nothing", "nothing"),
        (f"{__name__}.not_a_function", "must name a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, says):
    with pytest.raises(ValueError, match=f"`weigh_by`.*{says}"):
        weigher(name)


def test_equal_weights_leave_a_loss_as_it_is():
    weights = WindowWeights(tokens)
    weights.reference = 4.0
    loss = torch.tensor(3.0) / 1
    version = loss._version
    weights.take(4)
    weights.scale(loss)
    assert loss == 3
    assert loss._version == version
    assert weights.total == 4
    weights.take(1)
    weights.scale(loss)
    assert loss == 0.75
    assert weights.total == 5


def test_weights_on_a_device_stay_there():
    weights = WindowWeights(tokens)
    weights.reference = 2.0
    weights.take(torch.tensor(5))
    weights.scale(torch.tensor(1.0) / 1)
    assert isinstance(weights.total, torch.Tensor)
    assert weights.total == 5


@pytest.mark.parametrize("total", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_gradients_become_the_mean_of_the_window(total):
    dense, sparse, unused = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    dense.grad = torch.full((4,), 6.0)
    sparse.grad = torch.full((4,), 6.0).to_sparse()
    correct([dense, sparse, unused], 4, total)
    assert dense.grad.tolist() == [8.0] * 4
    assert sparse.grad.to_dense().tolist() == [8.0] * 4
    assert unused.grad is None


@pytest.mark.parametrize("total", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_window_without_weight_is_left_as_it_is(total):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    correct([parameter], 4, total)
    assert parameter.grad == 0
