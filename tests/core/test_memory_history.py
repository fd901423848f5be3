import pickle
from types import SimpleNamespace

import pytest
import torch

from lightning_memopt.core import memory_history
from lightning_memopt.core.memory_history import (
    can_record_history,
    recorded_history,
    save_snapshot,
    take_snapshot,
)

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def recorder(monkeypatch):
    """Stands in for CUDA's record: `tests/gpu` has the real one."""
    calls = []
    state = SimpleNamespace(calls=calls, is_on=False)

    def record(enabled, **kwargs):
        calls.append(kwargs.get("max_entries") if enabled else None)
        state.is_on = enabled is not None

    module = SimpleNamespace(_record_memory_history=record, _snapshot=lambda: {"segments": []})
    monkeypatch.setattr(memory_history, "_memory_module", lambda device: module)
    monkeypatch.setattr(memory_history, "_is_on", lambda device: state.is_on)
    return state


def test_a_cpu_keeps_no_record():
    assert not can_record_history(CPU)
    with recorded_history(CPU, 10):
        assert take_snapshot(CPU) is None


def test_a_record_is_on_while_somebody_wants_it_and_only_then(recorder):
    first, second = recorded_history(DEVICE, 10), recorded_history(DEVICE, 20)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert recorder.is_on
    second.__exit__(None, None, None)
    assert recorder.calls == [10, None]


def test_a_record_ends_after_an_exception(recorder):
    with pytest.raises(ValueError, match="mine"), recorded_history(DEVICE, 10):
        raise ValueError("mine")
    assert recorder.calls == [10, None]


def test_the_record_of_somebody_else_is_left_alone(recorder):
    recorder.is_on = True
    with recorded_history(DEVICE, 10):
        assert take_snapshot(DEVICE) == {"segments": []}
    assert recorder.calls == []
    assert recorder.is_on


def test_there_is_no_snapshot_where_nothing_is_recorded(recorder):
    assert take_snapshot(DEVICE) is None


def test_a_saved_snapshot_is_a_pickle_of_it(tmp_path):
    save_snapshot({"segments": [1]}, tmp_path / "a.pickle")
    assert pickle.loads((tmp_path / "a.pickle").read_bytes()) == {"segments": [1]}
