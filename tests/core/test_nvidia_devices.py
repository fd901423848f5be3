"""Cards, MIG instances and refusals of a driver that isn't here; `tests/gpu` asks a real one."""

# The names are those of NVIDIA.
# ruff: noqa: N802, N815

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml
import pytest

from lightning_memopt.core.machine_facts import Device, Driver
from lightning_memopt.core.nvidia_devices import NO_INSTANCE, read_nvidia
from lightning_memopt.core.units import GIB


def refuse(code=pynvml.NVML_ERROR_NOT_SUPPORTED):
    raise pynvml.NVMLError(code)


class Library:
    """NVIDIA's library whose handles are dicts of what they answer."""

    nvmlMemory_v2 = 2

    def __init__(self, *cards, version="580.1", cuda=13000):
        self.cards, self.version, self.cuda = cards, version, cuda
        self.is_shut = False

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.is_shut = True

    def nvmlSystemGetDriverVersion(self):
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index] or refuse(pynvml.NVML_ERROR_NO_PERMISSION)

    def nvmlDeviceGetName(self, handle):
        return handle["name"]

    def nvmlDeviceGetUUID(self, handle):
        return handle["uuid"]

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle["capability"]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        total, free = handle["memory"]
        if version is None:
            return SimpleNamespace(total=total, free=free)
        if handle.get("is_old"):
            refuse(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=total + GIB, reserved=GIB, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        found = handle.get("processes")
        if found is None:
            refuse(pynvml.NVML_ERROR_NO_PERMISSION)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    def nvmlDeviceGetMigMode(self, handle):
        instances = handle.get("instances")
        return refuse() if instances is None else [int(handle["is_mig"])] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        instances = handle["instances"]
        return instances[index] if index < len(instances) else refuse(pynvml.NVML_ERROR_NOT_FOUND)


def card(**more):
    facts = {"name": "H200", "uuid": "GPU-a", "capability": (9, 0), "memory": (140 * GIB, 99 * GIB)}
    return {**facts, **more}


SLICE = {"name": "H200 MIG 1g.18gb", "uuid": "MIG-b", "memory": (16 * GIB, 15 * GIB)}


def test_a_card_is_told_with_what_programs_may_have_of_it():
    library = Library(card(processes=[], instances=[], is_mig=False))
    driver, devices = read_nvidia(library)
    assert driver == Driver("580.1", (13, 0))
    assert devices == [
        Device(
            "H200",
            uuid="GPU-a",
            capability=(9, 0),
            is_mig_on=False,
            total=140 * GIB,
            free=99 * GIB,
            is_bf16=True,
        )
    ]
    assert devices[0].others == 41 * GIB
    assert library.is_shut


def test_an_old_library_and_an_old_card_are_told_as_far_as_they_go():
    _, (device,) = read_nvidia(Library(card(is_old=True, capability=(7, 0)), cuda=11080))
    assert (device.total, device.free) == (140 * GIB, 99 * GIB)
    assert (device.is_bf16, device.is_mig_on, device.processes) == (False, None, ())


def test_a_card_that_is_cut_is_replaced_by_its_instances():
    cut = card(instances=[SLICE, {**SLICE, "uuid": "MIG-c"}], is_mig=True)
    _, devices = read_nvidia(Library(cut, card(uuid="GPU-z")))
    assert [(each.uuid, each.mig_card, each.total) for each in devices] == [
        ("MIG-b", "GPU-a", 16 * GIB),
        ("MIG-c", "GPU-a", 16 * GIB),
        ("GPU-z", None, 140 * GIB),
    ]
    assert devices[0].name == "H200 MIG 1g.18gb"
    assert devices[0].capability == (9, 0)
    assert devices[0].is_bf16 is True


def test_a_card_without_an_instance_is_there_but_hidden():
    _, (device,) = read_nvidia(Library(card(instances=[], is_mig=True)))
    assert (device.is_mig_on, device.hidden_by) == (True, NO_INSTANCE)


def test_own_memory_is_kept_apart_from_that_of_others():
    _, (device,) = read_nvidia(Library(card(processes=[(os.getpid(), GIB), (2**22 + 1, 30 * GIB)])))
    assert [(each.pid, each.used) for each in device.processes] == [(2**22 + 1, 30 * GIB)]
    assert device.own == GIB
    assert device.others == 40 * GIB


def test_a_card_that_may_not_be_asked_says_so_beside_the_others():
    _, devices = read_nvidia(Library(None, card()))
    assert [device.name for device in devices] == ["GPU 0", "H200"]
    assert devices[0].hidden_by == "Insufficient Permissions"


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION),
        OSError("no such symbol"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_row_not_an_error(error):
    library = Library(card())

    def fail():
        raise error

    library.nvmlInit = fail
    assert read_nvidia(library) == (Driver(error=str(error)), [])


def test_a_driver_that_stops_answering_is_a_row_too():
    library = Library(card())
    library.nvmlDeviceGetCount = refuse
    driver, devices = read_nvidia(library)
    assert (driver.error, devices) == ("Not Supported", [])
    assert library.is_shut
