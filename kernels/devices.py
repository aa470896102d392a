"""The kinds of devices. No torch: a program that does not compute reads them too."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device.

    torch_type: torch's name for it.
    module, platform: module and class of its `kernels.platform.Platform`.
    is_host: as in `Platform`.
    drivers: files of which a machine with such a device has at least one; empty: every machine has the device.
    """

    torch_type: str
    module: str
    platform: str
    is_host: bool
    drivers: tuple[Path, ...] = ()

    def may_exist(self) -> bool:
        """Return whether this machine has the device's driver. Torch may have been built without support for it."""
        return not self.drivers or any(driver.exists() for driver in self.drivers)


# By the name in `--device`; `auto` takes the last one that the machine has.
DEVICES = {
    "cpu": DeviceKind("cpu", "kernels.cpu.platform", "CpuPlatform", is_host=True),
    "cuda": DeviceKind(
        "cuda",
        "kernels.gpu.platform",
        "CudaPlatform",
        is_host=False,
        # Device files of NVIDIA's driver on Linux, and of the GPU in Windows' Linux.
        drivers=(Path("/dev/nvidiactl"), Path("/dev/dxg")),
    ),
}
SIMULATED = "simulated"
SIMULATED_KIND = DeviceKind("meta", "kernels.simulated.platform", "SimulatedPlatform", is_host=False)
KINDS = (*DEVICES.values(), SIMULATED_KIND)


def kind_of(device: str) -> DeviceKind:
    """Return the kind of an engine's `--device`; of `auto` the one whose driver this machine has."""
    if device == "auto":
        return next(kind for kind in reversed(DEVICES.values()) if kind.may_exist())
    return SIMULATED_KIND if device.startswith(SIMULATED) else DEVICES[device]
