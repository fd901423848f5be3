"""Drop-in PyTorch Lightning callbacks that fit a model into memory and explain every byte."""

from lightning_memopt.callbacks.auto_accumulation import AutoAccumulation
from lightning_memopt.callbacks.automatic_mixed_precision import AutomaticMixedPrecision
from lightning_memopt.callbacks.empty_cache import EmptyCache
from lightning_memopt.callbacks.gradient_accumulation import GradientAccumulation
from lightning_memopt.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.callbacks.memory_profiler import MemoryProfiler
from lightning_memopt.callbacks.oom_report import OOMReport
from lightning_memopt.core.batches import split_batch
from lightning_memopt.core.estimate import estimate
from lightning_memopt.core.growth import MemoryGrowthWarning
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.memory import read_memory
from lightning_memopt.core.oom import is_out_of_memory
from lightning_memopt.core.recompute import checkpoint_layers
from lightning_memopt.core.recomputing import is_recomputing
from lightning_memopt.core.traced_step import anatomy

__version__ = "0.1.0"

__all__ = [
    "AutoAccumulation",
    "AutomaticMixedPrecision",
    "EmptyCache",
    "GradientAccumulation",
    "GradientCheckpointing",
    "MemoryGrowthWarning",
    "MemoryMonitor",
    "MemoryProfiler",
    "OOMReport",
    "anatomy",
    "checkpoint_layers",
    "estimate",
    "is_out_of_memory",
    "is_recomputing",
    "read_memory",
    "select_layers",
    "split_batch",
]
