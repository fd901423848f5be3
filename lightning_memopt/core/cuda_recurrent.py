"""What cuDNN's recurrent layers keep, as one operator that makes results of the right sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Numbers that cuDNN keeps of each hidden one of each step, found on an H200: the gates and what
# comes of them.
_KEPT = {"lstm": 5, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


class _Recurrent(torch.autograd.Function):
    """Layers whose results have the shapes of cuDNN's."""

    @staticmethod
    def forward(
        ctx: Any, name: str, kept: int, width: int, inputs: Tensor, states: int, *others: Tensor
    ) -> tuple[Tensor, ...]:
        """Make the output, the last states and what is kept for backward."""
        output = inputs.new_empty(*inputs.shape[:-1], width)
        last = [state.new_empty(state.shape) for state in others[:states]]
        reserve = inputs.new_empty(kept)
        workspace = inputs.new_empty(kept * _GATES[name] // (_KEPT[name] + 1))
        del workspace
        ctx.save_for_backward(inputs, *others, output, reserve)
        ctx.gates = kept * _GATES[name] // (_KEPT[name] + 1)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Make the gradients."""
        inputs, *others, _, _ = ctx.saved_tensors
        workspace = inputs.new_empty(ctx.gates)
        made = [torch.empty_like(tensor) for tensor in (inputs, *others)]
        del workspace
        return None, None, None, made[0], None, *made[1:]


def run_recurrent(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run `torch.lstm`, `torch.gru` or `torch.rnn_*` as cuDNN would."""
    is_packed = isinstance(args[3], list | tuple)
    if is_packed:
        inputs, _, states, weights, _, layers, dropout, training, both = args[:9]
    else:
        inputs, states, weights, _, layers, dropout, training, both = args[:8]
    states = list(states) if isinstance(states, list | tuple) else [states]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        inputs = inputs.to(dtype)
        states, weights = [s.to(dtype) for s in states], [w.to(dtype) for w in weights]
    hidden, directions = states[0].shape[-1], 2 if both else 1
    steps = inputs.shape[:-1].numel()
    kept = steps * hidden * directions * layers * _KEPT[name]
    if dropout and training:
        kept += 2 * steps * hidden * directions * (layers - 1)
    outputs = _Recurrent.apply(
        name, kept, hidden * directions, inputs, len(states), *states, *weights
    )
    return tuple(outputs)
