"""Floating-point operations of what is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


class Flops:
    """Counts the products of operators by PyTorch's formulas, which leave all else out.

    PyTorch's own `FlopCounterMode` keeps tensors of checkpointed modules alive.

    Attributes:
        total: Operations so far; a product and a sum are two.
    """

    def __init__(self) -> None:
        self.total = 0

    def add(self, func: Any, args: tuple[Any, ...], results: list[Tensor]) -> None:
        """Count an operator.

        Args:
            func: The operator.
            args: Its positional arguments.
            results: Tensors that it has made.
        """
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            return
        made: Any = results[0] if len(results) == 1 else tuple(results)
        if func.overloadpacket is torch.ops.aten.convolution_backward:
            made = args[1], args[2]  # of one shape with their gradients, some of which are `None`
        self.total += formula(*args, out_val=made)
