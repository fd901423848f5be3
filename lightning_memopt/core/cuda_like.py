"""PyTorch's choices on CUDA, made for tensors that only say they are on a CPU.

Fake tensors can't be said to be on CUDA where there is none: backward asks the driver. So a step is
traced on fake CPU tensors, and where CUDA would run something else, that is put in its place: mixed
precision's float32 operators, fused attention, dropout with a mask of bytes, recurrent layers of
cuDNN.

Source: PyTorch's documentation of autocast, https://docs.pytorch.org/docs/stable/amp.html, and of
`scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memopt.core.cuda_recurrent import run_recurrent

# fmt: off
_IN_FLOAT32 = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin",
    "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy_loss", "dist", "erfinv", "exp", "expm1", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log1p", "log2", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "pdist",
    "poisson_nll_loss", "pow", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softplus", "tan", "triplet_margin_loss",
}
# fmt: on
_WITH_DTYPE = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}
# fmt: off
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot",
}
# fmt: on
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MODULES_WITH_CHECKS = (torch.nn.functional, torch.functional, torch._tensor)
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_MAX_FLASH_WIDTH = 256


class CudaLike(TorchFunctionMode):
    """Makes CPU tensors be handled as on CUDA, as far as memory can tell the two apart."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or what CUDA has in its place."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name in ("is_cuda", "__get__"):
            return func(*args, **kwargs)
        args, kwargs = (
            tuple(map(_without_cuda, args)),
            {k: _without_cuda(v) for k, v in kwargs.items()},
        )
        if name in _RECURRENT:
            return run_recurrent(name, args)
        if name == "scaled_dot_product_attention":
            return _attention(func, *args, **kwargs)
        if name == "dropout" and len(args) == 3 and args[2] and 0 < args[1] < 1:
            return torch.native_dropout(args[0], args[1], True)[0]
        if torch.is_autocast_enabled("cpu"):
            values = (*args, *kwargs.values())
            if name in _IN_FLOAT32 or (name in _WIDEST and any(map(_is_float32, values))):
                args = tuple(map(_in_float32, args))
                kwargs = {k: _in_float32(v) for k, v in kwargs.items()}
            elif name in _WITH_DTYPE and kwargs.get("dtype") is None and _is_half(args[0]):
                args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)


@contextmanager
def cuda_like() -> Iterator[None]:
    """Handle CPU tensors as on CUDA within.

    Functions that are written in Python let a mode answer for the whole of them; here they run, and
    what they call is answered for.
    """
    with ExitStack() as stack:
        for module in _MODULES_WITH_CHECKS:
            for check in _CHECKS:
                if hasattr(module, check):
                    stack.enter_context(mock.patch.object(module, check, _no))
        stack.enter_context(CudaLike())
        yield


def _no(*_: Any) -> bool:
    return False


def _without_cuda(value: Any) -> Any:
    is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _is_float32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _in_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _attention(
    math: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the attention that CUDA would choose."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    aten: Any = torch.ops.aten
    is_fused = query.dim() == 4 and not (attn_mask is not None and attn_mask.requires_grad)
    if is_fused and _is_half(query) and query.shape[-1] <= _MAX_FLASH_WIDTH:
        if attn_mask is None:
            flash = aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        efficient = True
    else:
        efficient = is_fused and query.shape[1] == key.shape[1]
    if efficient:
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, key)
        run = aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    return _unfused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention as PyTorch does it where no kernel can, in float32."""
    dtype = query.dtype
    query, key, value = _in_float32(query), _in_float32(key), _in_float32(value)
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    with torch.autocast("cpu", enabled=False):
        root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        scores = (query * root) @ (key * root).transpose(-2, -1)
        if is_causal:
            scores = scores + torch.zeros_like(scores[..., :, :][(0,) * (scores.dim() - 2)])
        if mask is not None:
            bias = torch.zeros_like(mask, dtype=scores.dtype) if mask.dtype == torch.bool else mask
            scores = scores.add_(_in_float32(bias))
        weights = scores.softmax(-1)
        if dropout:
            weights = torch.native_dropout(weights, dropout, True)[0]
        attended: Tensor = (weights @ value).to(dtype)
        return attended


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the bias that kernels read: of the scores' shape and type."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -1e9)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
