"""What was found on a machine, as plain figures; sizes in bytes, `None` is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of a device.

    Attributes:
        pid: Its number.
        name: Its program, `"?"` where that can't be told.
        used: Bytes that it holds, its context included.
    """

    pid: int
    name: str
    used: int


@dataclass(frozen=True)
class Device:
    """An accelerator, or a MIG instance of one.

    Attributes:
        name: Its maker's name for it.
        uuid: What `CUDA_VISIBLE_DEVICES` may call it, `""` where it has none.
        torch_name: What torch calls it here, `None` if this process can't use it.
        hidden_by: Why this process can't use it, `None` if it can.
        capability: Compute capability.
        is_mig_on: Whether the card is cut into MIG instances.
        mig_card: UUID of the card that this is a MIG instance of.
        total: What programs may have of it.
        free: What nobody uses.
        own: What this process holds of it.
        usable: What this process may use, what it holds included.
        processes: Other processes that hold memory of it, as far as the driver tells.
        is_bf16: Whether it has bf16 arithmetic of its own.
    """

    name: str
    uuid: str = ""
    torch_name: str | None = None
    hidden_by: str | None = None
    capability: tuple[int, int] | None = None
    is_mig_on: bool | None = None
    mig_card: str | None = None
    total: int | None = None
    free: int | None = None
    own: int = 0
    usable: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    is_bf16: bool | None = None

    @property
    def others(self) -> int | None:
        """Bytes in use by everyone but this process."""
        if self.total is None or self.free is None:
            return None
        return max(0, self.total - self.free - self.own)


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: Its version.
        cuda: The newest CUDA that it runs.
        error: Why it doesn't answer.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch.

    Attributes:
        version: Its version.
        cuda: The CUDA it was built with.
        hip: The ROCm it was built with.
        is_cuda_available: Whether it can compute on a CUDA (or ROCm) device here.
        error: What it said when asked for one.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    is_cuda_available: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Host:
    """The CPU and its memory.

    Attributes:
        total: RAM of the machine.
        available: RAM that is free or can be freed.
        usable: How large this process's resident memory may become.
        cgroup_limit: The tightest limit of the control groups around this process.
        address_space_limit: `RLIMIT_AS`.
        cores: Logical cores of the machine.
        usable_cores: Those that this process may run on.
        quota: Cores' worth of time that the control group grants.
        is_bf16: Whether it has bf16 arithmetic of its own.
    """

    total: int
    available: int
    usable: int
    cgroup_limit: int | None
    address_space_limit: int | None
    cores: int
    usable_cores: int
    quota: float | None
    is_bf16: bool


@dataclass(frozen=True)
class Package:
    """A package that the suite needs or can use.

    Attributes:
        name: Its name.
        version: What is installed, `None` if it isn't.
        needs: The versions that are promised to work, `""` if any.
        extra: The extra that brings it, `None` where none does.
        is_optional: Whether the suite works without it.
        is_too_old: Whether what is installed isn't one of `needs`.
    """

    name: str
    version: str | None
    needs: str = ""
    extra: str | None = None
    is_optional: bool = False
    is_too_old: bool = False


@dataclass(frozen=True)
class Machine:
    """All that was found.

    Attributes:
        platform: `"linux"`, `"wsl"`, `"win32"`, `"darwin"` or what else Python calls it.
        driver: NVIDIA's driver.
        torch: The installed PyTorch.
        devices: Accelerators, in torch's order, those that are hidden last.
        host: The CPU.
        packages: What is installed.
        variables: Environment variables that matter, as they are set.
    """

    platform: str
    driver: Driver
    torch: Torch
    devices: tuple[Device, ...]
    host: Host
    packages: tuple[Package, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def visible(self) -> tuple[Device, ...]:
        """The accelerators that this process can use."""
        return tuple(device for device in self.devices if device.torch_name is not None)

    @property
    def has_cuda(self) -> bool:
        """Whether this process can use a GPU of NVIDIA's."""
        return self.torch.is_cuda_available and self.torch.hip is None
