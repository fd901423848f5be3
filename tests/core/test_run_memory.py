import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memopt.core.run_memory import RunMemory

CPU = torch.device("cpu")


def run(model, optimizers=(), batch=None):
    return RunMemory(CPU, model, optimizers, batch)


def make():
    model = nn.Sequential(nn.Linear(100, 50, bias=False), nn.BatchNorm1d(50), nn.ReLU())
    x = torch.ones(30, 100)
    return model, x


def test_each_kind_is_counted_to_the_byte():
    model, x = make()
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    loss = model(x).square().sum()
    memory = run(model, [optimizer], [x])
    parameters = 4 * (100 * 50 + 2 * 50)
    assert memory.sizes == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer state": 2 * parameters + 3 * 4,  # Adam counts its steps for each tensor
        "buffers": 4 * 2 * 50 + 8,
        "batch": 30 * 100 * 4,
        "activations": memory.kept.total_bytes,
    }
    # The input of BatchNorm, its mean and deviation, and the result of ReLU. Other graphs that are
    # alive in this process lead to no module of this model.
    assert dict(memory.kept.by_module())["1"] == 4 * (30 * 50 + 2 * 50 + 30 * 50)
    assert memory.float32_activations >= 4 * (30 * 50 + 2 * 50 + 30 * 50)
    assert loss.requires_grad


def test_shared_storage_counts_once_and_to_the_first_kind():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:5])
    sizes = run(model).sizes
    assert sizes["parameters"] == 400
    assert sizes["buffers"] == 0


def test_a_plain_optimizer_has_no_state():
    model, x = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert run(model, [optimizer]).sizes["optimizer state"] == 0


def test_what_is_on_another_device_is_left_out():
    model = nn.Linear(10, 10, device="meta")
    assert run(model).sizes["parameters"] == 0


def test_the_kind_of_each_storage_is_known_by_its_address():
    model, x = make()
    kinds = run(model, batch={"x": x}).kinds
    assert kinds[x.untyped_storage().data_ptr()] == "batch"
    assert kinds[model[0].weight.untyped_storage().data_ptr()] == "parameters"


def test_live_tensors_are_listed_by_shape_with_views_once():
    kept = [torch.ones(123, 457) for _ in range(3)]
    kept += [kept[0][:], kept[0].view(-1)]
    rows = {group.shape: group for group in run(nn.Identity()).tensors_by_shape()}
    assert (rows[123, 457].count, rows[123, 457].size) == (3, 3 * 4 * 123 * 457)
    assert (123 * 457,) not in rows


def test_tensors_without_storage_of_their_own_are_passed_over():
    weight = nn.Parameter(torch.ones(4, 4))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = (mode.from_tensor(torch.ones(4, 4)) * 2).requires_grad_().exp().sum()
    kept = [fake, (torch.eye(4).to_sparse() @ weight).exp().sum()]
    memory = run(nn.ParameterList([weight]))
    assert memory.sizes["parameters"] == 64
    assert memory.kept.total_bytes >= 64
    assert len(kept) == 2
