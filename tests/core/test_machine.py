from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest
import torch

from lightning_memopt.core import host_cores, host_memory, machine, package_versions
from lightning_memopt.core.machine import read_machine
from lightning_memopt.core.units import GIB

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")


class Nothing:
    """A library of NVIDIA's that answers nothing but its name."""

    def nvmlInit(self):  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@no_cuda
def test_a_machine_without_a_driver_is_read_without_an_error():
    found = read_machine(Nothing())
    assert found.driver.error == "Driver Not Loaded"
    assert found.visible == ()
    assert not found.has_cuda
    assert found.torch.error is None or "NVIDIA" in found.torch.error or "CUDA" in found.torch.error


def test_a_device_that_fails_when_it_is_asked_is_a_row(monkeypatch):
    def fail():
        raise RuntimeError("half a driver\nand a trace")

    broken = SimpleNamespace(is_available=lambda: True, device_count=fail)
    monkeypatch.setattr(torch, "xpu", broken)
    (device,) = [each for each in read_machine(Nothing()).devices if each.name == "xpu"]
    assert device.hidden_by == "RuntimeError: half a driver"
    assert device.torch_name is None


def test_another_makers_device_is_told_as_torch_tells_it(monkeypatch):
    xpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_name=lambda index: "Arc",
        memory_reserved=lambda index: 2 * GIB,
        mem_get_info=lambda index: (9 * GIB, 16 * GIB),
        is_bf16_supported=lambda: True,
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "get_device_module", lambda device: xpu)
    (device,) = [each for each in read_machine(Nothing()).visible if each.torch_name == "xpu:0"]
    assert (device.name, device.is_bf16) == ("Arc", True)
    assert (device.others, device.usable) == (5 * GIB, 11 * GIB)


def test_windows_own_linux_is_told_from_others(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.platform, "release", lambda: "5.15.1-microsoft-standard-WSL2")
    assert read_machine(Nothing()).platform == "wsl"


# The host


@pytest.mark.parametrize(
    ("files", "group", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, "0::/{}\n", 2.5),
        ({"cpu.max": "max 100000\n"}, "0::/{}\n", None),
        ({}, "0::/{}\n", None),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, "1:cpu,x:/{}\n", None),
        ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, "1:cpu,x:/{}\n", 0.5),
    ],
)
def test_the_time_that_a_control_group_grants_counts_in_cores(
    monkeypatch, tmp_path, files, group, expected
):
    groups = tmp_path / "groups"
    groups.write_text(f"4:memory:/x\n{group.format('job/step')}")
    folder = tmp_path / ("cpu/job" if "cpu," in group else "job")
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(host_cores, "_CGROUPS_OF_PROCESS", groups)
    monkeypatch.setattr(host_cores, "_ROOT", tmp_path)
    assert host_cores.core_quota() == expected


def test_without_control_groups_no_time_is_granted(monkeypatch, tmp_path):
    monkeypatch.setattr(host_cores, "_CGROUPS_OF_PROCESS", tmp_path / "missing")
    assert host_cores.core_quota() is None


@pytest.mark.parametrize(("limit", "expected"), [(GIB, GIB), ("max", None), (2**63 - 4096, None)])
def test_the_limit_of_a_control_group_is_told_where_it_is_one(
    monkeypatch, tmp_path, limit, expected
):
    (tmp_path / "groups").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(host_memory, "_CGROUPS_OF_PROCESS", tmp_path / "groups")
    names = host_memory._CGROUP_2[1:]
    monkeypatch.setattr(host_memory, "_CGROUP_2", (tmp_path, *names))
    assert host_memory.cgroup_limit_bytes() == expected


# Packages


@pytest.fixture
def installed(monkeypatch):
    """Give the suite's promises, and what is installed."""

    def give(requires, **versions):
        found = SimpleNamespace(metadata={"Requires-Python": ">=3.10"}, requires=requires)
        monkeypatch.setattr(package_versions.metadata, "distribution", lambda name: found)

        def version(name):
            if name not in versions:
                raise package_versions.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(package_versions.metadata, "version", version)
        return {package.name: package for package in package_versions.read_packages()}

    return give


def test_a_version_below_what_is_promised_is_told(installed):
    found = installed(["torch>=2.6", "lightning>=2.5"], torch="2.5.1+cpu", lightning="2.5.0rc1")
    assert (found["torch"].needs, found["torch"].is_too_old) == (">=2.6", True)
    assert found["lightning"].is_too_old  # a candidate comes before its release
    assert not found["python"].is_too_old


def test_an_optional_package_is_told_with_the_extra_for_users(installed):
    extras = ("dev", "examples", "profiler")
    found = installed([f"matplotlib>=3.8; extra == '{extra}'" for extra in extras])
    package = found["matplotlib"]
    assert (package.version, package.needs) == (None, ">=3.8")
    assert (package.extra, package.is_optional) == ("profiler", True)
    assert found["torchao"].extra is None


def test_a_suite_that_is_not_installed_promises_nothing(monkeypatch):
    monkeypatch.setattr(package_versions, "_SUITE", "no-such-suite")
    found = {package.name: package for package in package_versions.read_packages()}
    assert found["torch"].needs == ""
    assert found["torch"].version is not None
