"""What CUDA would keep and take, from tensors that only say they are on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import estimate
from lightning_memopt.core.anatomy import Anatomy
from lightning_memopt.core.cuda_like import cuda_like
from lightning_memopt.core.cuda_temporaries import temporary_bytes
from lightning_memopt.core.units import MIB


class Attends(nn.Module):
    """Self-attention of 4 heads of 16 features."""

    def __init__(self, mask: Tensor | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 192)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        return attend(*parts, attn_mask=self.mask, dropout_p=self.dropout)


def on_cuda(module: nn.Module, batch: Any, precision: str = "32-true") -> Anatomy:
    """Return the anatomy that is predicted on CUDA."""
    found = estimate(module, batch, precision, optimizer="SGD", device="cuda")
    assert found.reason == ""
    return found.anatomy


@pytest.mark.parametrize(
    ("precision", "mask", "kernel"),
    [
        ("32-true", None, "efficient"),
        ("32-true", torch.ones(32, 32, dtype=torch.bool), "efficient"),
        ("bf16-mixed", None, "flash"),
        ("bf16-true", None, "flash"),
        ("16-mixed", torch.ones(32, 32, dtype=torch.bool), "efficient"),
    ],
)
def test_attention_runs_in_the_kernel_that_cuda_chooses(
    precision: str, mask: Tensor | None, kernel: str
) -> None:
    kept = dict(on_cuda(Attends(mask), torch.zeros(2, 32, 64), precision).kept_by("operator"))
    element = 4 if precision == "32-true" else 2
    (attended,) = [size for name, size in kept.items() if f"_{kernel}_attention" in name]
    output, sums = 2 * 4 * 32 * 16 * element, 2 * 4 * 32 * 4  # and the log of each row's sum
    assert output + sums <= attended <= output + sums + 64
    assert "softmax" not in " ".join(kept)


def test_scores_are_kept_where_a_mask_learns() -> None:
    mask = nn.Parameter(torch.zeros(32, 32))
    kept = dict(on_cuda(Attends(mask), torch.zeros(2, 32, 64)).kept_by("operator"))
    assert kept["_softmax"] == 2 * 4 * 32 * 32 * 4


def test_dropout_keeps_a_byte_for_each_number() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
    kept = dict(on_cuda(module, torch.zeros(8, 64)).kept_by("operator"))
    assert kept["native_dropout"] == 8 * 64


def test_mixed_precision_runs_norms_and_losses_in_float32() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Softmax(-1))
    kept = on_cuda(module, torch.zeros(8, 64), "bf16-mixed").kept
    found = {(part.module, part.operator, part.dtype): part.size for part in kept}
    assert found["2", "_softmax", "float32"] == 8 * 64 * 4
    assert found["1", "_to_copy", "float32"] == 8 * 64 * 4  # the norm's input
    assert found["0", "_to_copy", "bfloat16"] == 8 * 64 * 2


@pytest.mark.parametrize(("layer", "numbers"), [(nn.LSTM, 5), (nn.GRU, 5), (nn.RNN, 1)])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_recurrent_layers_keep_what_cudnn_reserves(
    layer: Any, numbers: int, is_bidirectional: bool
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(8, 16, 2, batch_first=True, bidirectional=is_bidirectional)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    found = on_cuda(Recurrent(), torch.zeros(4, 32, 8))
    directions = 2 if is_bidirectional else 1
    hidden = 4 * 32 * 16 * directions * 4  # bytes of a layer's output
    assert found.kept_bytes >= hidden * (1 + 2 * numbers)
    assert found.kept_bytes <= hidden * (1 + 2 * numbers) + 4 * 32 * 8 * 4 + 8 * 4 * 16 * 4


def test_calls_of_cuda_stay_where_there_is_none() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            more = torch.zeros(2, 4, device="cuda") + torch.ones(2, 4).cuda()
            return self.linear(x.to("cuda:0") + more.to(torch.device("cuda")))

    assert on_cuda(Moves(), torch.zeros(2, 4)).size_of("parameters") == 80


def test_all_is_as_before_afterwards() -> None:
    checks = torch.nn.functional.has_torch_function
    with pytest.raises(KeyError), cuda_like():
        raise KeyError
    assert torch.nn.functional.has_torch_function is checks
    torch.manual_seed(0)
    first = nn.functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(0)
    assert torch.equal(first, nn.functional.dropout(torch.ones(64), 0.5))


def test_convolutions_turn_what_is_not_channels_last() -> None:
    aten: Any = torch.ops.aten
    image, weight = torch.zeros(2, 8, 16, 16), torch.zeros(4, 8, 1, 1)
    made = torch.zeros(2, 4, 16, 16)

    def taken(inputs: Tensor, kernel: Tensor = weight, groups: int = 1) -> int:
        args = (inputs, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], groups)
        return temporary_bytes(aten.convolution.default, args, [made])

    assert taken(image) == (2 * 8 + 2 * 4) * 256 * 4
    assert taken(image.to(memory_format=torch.channels_last)) == 0
    assert taken(image, torch.zeros(8, 1, 3, 3), groups=8) == 0


def test_operators_without_a_rule_take_nothing() -> None:
    assert temporary_bytes(torch.ops.aten.add.Tensor, (torch.ones(9), 1), [torch.ones(9)]) == 0


def test_a_sum_of_many_rows_is_put_together_from_blocks() -> None:
    total: Any = torch.ops.aten.sum.dim_IntList
    few, many = torch.zeros(16, 64), torch.zeros(2**16, 64)
    assert temporary_bytes(total, (few, [0]), []) == 0
    assert 0 < temporary_bytes(total, (many, [0]), []) < 64 * MIB
    assert temporary_bytes(total, (many, [1]), []) == 0
