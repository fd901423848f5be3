"""What is known of a recomputation: that it runs, of which block, and what its errors say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.checkpoint import CheckpointError

from lightning_memopt.core.oom import is_out_of_memory

_REASON = "did not repeat itself"
_state = threading.local()
_last_recomputed = ""


class EarlyStopError(Exception):
    """Ends a recomputation that has computed all that is needed."""


def is_recomputing() -> bool:
    """Return whether this forward is a repetition, run in backward for a checkpointed module.

    Use it in hooks and metrics inside a checkpointed module that must count once.

    Returns:
        `True` while a checkpointed module is run again.

    Example:
        >>> is_recomputing()
        False
    """
    return getattr(_state, "depth", 0) > 0


@contextmanager
def recomputing(name: str, is_keeping: bool = False) -> Iterator[None]:
    """Run a block once more, within.

    Args:
        name: Its qualified name.
        is_keeping: Whether some results within it are kept.

    Raises:
        CheckpointError: The block fails, for another reason than memory.
    """
    global _last_recomputed
    _last_recomputed = name
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    except Exception as error:
        # PyTorch ends a recomputation early by an exception of its own.
        is_early_stop = isinstance(error, EarlyStopError)
        if type(error).__module__ == CheckpointError.__module__ or is_early_stop:
            raise
        if is_out_of_memory(error):
            raise
        raise CheckpointError(explanation(name, str(error), is_keeping)) from error
    finally:
        _state.depth -= 1
        _last_recomputed = name  # not that of a block within


def explanation(name: str, reason: str, is_keeping: bool = False) -> str:
    """Say why a block can't be recomputed, and what to do."""
    otherwise = ', set `keep="nothing"`' if is_keeping else ""
    return (
        f"`{name}` {_REASON} when it was recomputed in backward ({reason.strip()}); "
        f"leave it out of `layers`{otherwise}, or make its forward depend only on its inputs, "
        "parameters, buffers and the random state of torch, Python and NumPy."
    )


def explain_mismatch(exception: BaseException) -> None:
    """Put the name of the block and what to do into PyTorch's error about a recomputation."""
    if isinstance(exception, CheckpointError) and _REASON not in str(exception):
        exception.args = (explanation(_last_recomputed, str(exception).partition("\n")[0]),)
