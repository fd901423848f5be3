import pytest
import torch
from torch import nn

from lightning_memopt.core.recompute import checkpoint_layers
from lightning_memopt.core.saved_tensors import record_saved_tensors
from lightning_memopt.core.storages import WeakStorage

FLOAT = 4
BATCH, WIDTH, HIDDEN, DEPTH = 16, 32, 64, 8

INPUT = FLOAT * BATCH * WIDTH
# LayerNorm keeps its input, a mean and an inverse deviation; the linear layers what goes into them;
# GELU its input.
INSIDE = FLOAT * BATCH * (2 + WIDTH + HIDDEN + HIDDEN)


def block():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
    )


def saved_bytes(model, x):
    with record_saved_tensors(model) as saved:
        model(x)
    return saved.total_bytes


def test_a_linear_layer_keeps_its_input_and_a_tanh_its_output():
    assert saved_bytes(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.ones(2, 4)) == (
        FLOAT * 2 * 4 + FLOAT * 2 * 8
    )


def test_parameters_and_buffers_are_left_out_and_batch_statistics_are_not():
    x = torch.randn(16, 4)
    assert saved_bytes(nn.Linear(4, 4), x) == x.nbytes
    mean_and_deviation = 2 * 4 * FLOAT
    assert saved_bytes(nn.BatchNorm1d(4), x) == x.nbytes + mean_and_deviation
    assert saved_bytes(nn.BatchNorm1d(4).eval(), x) == x.nbytes


def test_a_storage_that_is_kept_twice_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            return x.sin() + x.cos() + x.view(-1).exp().view_as(x)[:, :1]

    x = torch.ones(4, 4, requires_grad=True)
    exp = 4 * 4 * FLOAT
    assert saved_bytes(Twice(), x) == x.nbytes + exp


def test_a_view_counts_the_whole_storage_that_it_keeps_alive():
    base = torch.ones(100, requires_grad=True)

    class Sliced(nn.Module):
        def forward(self, x):
            return x.detach()[:1].requires_grad_().sin()

    assert saved_bytes(Sliced(), base) == base.nbytes


def test_storages_that_are_freed_in_between_are_not_taken_for_one():
    layer = nn.Linear(64, 64)
    with record_saved_tensors(layer) as saved:
        for _ in range(10):
            layer(torch.ones(2, 64))  # freed at once: the next one may lie at its address
    assert saved.total_bytes == 10 * FLOAT * 2 * 64


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        assert saved_bytes(block(), torch.ones(BATCH, WIDTH)) == 0


def test_the_record_ends_with_the_context_and_the_backward_still_runs():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with record_saved_tensors(layer) as saved:
        y = layer(x)
    layer(torch.ones(3, 4))
    assert saved.total_bytes == x.nbytes
    y.sum().backward()
    assert layer.weight.grad.sum().item() == 2 * 4 * 4


def test_checkpointing_more_blocks_keeps_exactly_so_much_less():
    found = []
    for every in (None, 4, 2, 1):
        model = nn.Sequential(*[block() for _ in range(DEPTH)])
        names = [] if every is None else [str(i) for i in range(0, DEPTH, every)]
        checkpoint_layers(model, names)
        found.append(saved_bytes(model, torch.randn(BATCH, WIDTH)))
        assert found[-1] == DEPTH * INPUT + (DEPTH - len(names)) * INSIDE
    assert found == sorted(set(found), reverse=True)
    assert found[-1] == DEPTH * INPUT


def test_one_segment_of_all_blocks_keeps_its_input_alone():
    model = nn.Sequential(nn.Sequential(*[block() for _ in range(DEPTH)]))
    checkpoint_layers(model, ["0"])
    assert saved_bytes(model, torch.randn(BATCH, WIDTH)) == INPUT


@pytest.mark.parametrize("names", [[], ["0"], ["0", "1"]])
def test_what_is_kept_for_backward_is_kept_by_eval_mode_too(names):
    model = nn.Sequential(block(), block()).eval()
    checkpoint_layers(model, names)
    expected = 2 * INPUT + (2 - len(names)) * INSIDE
    assert saved_bytes(model, torch.randn(BATCH, WIDTH)) == expected


def test_what_was_recorded_is_freed_with_its_graph():
    layer = nn.Tanh()  # which keeps its own result
    x = torch.ones(3, requires_grad=True)
    with record_saved_tensors(layer):
        y = layer(x)
    storage = WeakStorage(y.untyped_storage())
    del y
    assert storage.is_freed
