import pytest
import torch

from lightning_memopt.core import host_memory
from lightning_memopt.core.memory_limits import limit_bytes, usable_bytes


def test_what_a_process_may_use_of_a_cpu_is_the_hosts_answer(monkeypatch):
    monkeypatch.setattr(host_memory, "usable_bytes", lambda: 123)
    monkeypatch.setattr(host_memory, "limit_bytes", lambda: 456)
    assert usable_bytes(torch.device("cpu")) == 123
    assert limit_bytes(torch.device("cpu")) == 456


def test_what_a_device_does_not_tell_is_unknown(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert usable_bytes(torch.device("meta")) is None
    assert limit_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(("fraction", "usable", "limit"), [(1.0, 70, 100), (0.5, 50, 50)])
def test_other_processes_and_the_own_share_limit_what_may_be_used(
    monkeypatch, fraction, usable, limit
):
    class Module:
        mem_get_info = staticmethod(lambda device: (40, 100))  # 30 of 60 in use are ours
        memory_reserved = staticmethod(lambda device: 30)
        get_per_process_memory_fraction = staticmethod(lambda device: fraction)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert usable_bytes(torch.device("cuda", 0)) == usable
    assert limit_bytes(torch.device("cuda", 0)) == limit
