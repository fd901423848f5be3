from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from lightning_memopt.core import device_processes
from lightning_memopt.core.device_processes import processes_on
from lightning_memopt.core.machine_facts import DeviceProcess


@pytest.fixture
def driver(monkeypatch):
    """NVIDIA's library with answers of this test; `tests/gpu` asks the real one."""
    found = []
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: found if handle == "GPU-abc" else [],
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


def test_processes_are_listed_the_largest_first(driver):
    me = psutil.Process()
    for pid, used in ((me.pid, 10), (2**22 + 1, 30), (7, None)):
        driver.append(SimpleNamespace(pid=pid, usedGpuMemory=used))
    assert processes_on(torch.device("cuda", 0)) == [
        DeviceProcess(2**22 + 1, "?", 30),
        DeviceProcess(me.pid, me.name(), 10),
    ]


def test_a_driver_that_is_not_there_has_no_processes(driver, monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(device_processes.pynvml, "nvmlInit", missing)
    assert processes_on(torch.device("cuda", 0)) == []


def test_a_cpu_is_not_asked():
    assert processes_on(torch.device("cpu")) == []
