from __future__ import annotations

import torch
import torchvision
from torch import nn

from lightning_memopt.core.model_variants import output_head, variants_of


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def changed(model, word):
    """Apply the variant whose name has a word, and return its model."""
    (variant,) = [each for each in variants_of(model) if word in each.what]
    variant.change(model)
    return model


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_dense_convolutions_become_separable_with_the_same_shapes():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, (3, 5), 2, (1, 2), 2), nn.Conv2d(32, 32, 1)
    )
    batch = torch.rand(2, 3, 20, 20)
    shape, stem = model(batch).shape, model[0].weight
    changed(model, "1 dense convolutions")
    assert model(batch).shape == shape
    assert model[0].weight is stem
    assert [p.shape for p in model[1].parameters()] == [(16, 1, 3, 5), (32, 16, 1, 1), (32,)]


def test_a_type_is_kept():
    model = nn.Sequential(nn.Conv2d(16, 16, 3)).to(torch.bfloat16)
    changed(model, "dense")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_head_of_vgg_reads_a_mean_of_each_channel():
    model = torchvision.models.vgg11()
    before = count(model)
    changed(model, "global average pooling before `classifier.0`")
    assert before - count(model) == (25_088 - 512) * 4_096
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 1000)


def test_a_head_without_a_pool_is_found_too():
    model = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 16, 10))
    changed(model, "global average pooling before `3`")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_the_mean_is_that_of_each_channel():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(16, 3))
    changed(model, "pooling")
    batch = torch.rand(2, 1, 2, 2)
    expected = model[2].linear(model[0](batch).mean((2, 3)))
    torch.testing.assert_close(model(batch), expected)


def test_weights_are_tied():
    model = changed(Language(), "`head` tied to `embedding`")
    assert model.head.weight is model.embedding.weight
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 50)


def test_what_is_done_already_is_not_said():
    assert variants_of(Language(tied=True)) == []
    names = [
        each.what
        for make in (torchvision.models.mobilenet_v2, torchvision.models.vit_b_16)
        for each in variants_of(make())
    ]
    assert names == []


def test_a_residual_network_has_no_wide_head():
    (variant,) = variants_of(torchvision.models.resnet18())
    assert variant.what == "depthwise-separable instead of 16 dense convolutions"


def test_the_output_head_is_the_last_linear_layer():
    name, linear = output_head(Language())
    assert (name, linear.out_features) == ("head", 50)
    assert output_head(nn.Conv2d(1, 1, 1)) is None
