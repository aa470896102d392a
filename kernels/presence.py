"""Signs of devices that need no torch, for a program that does not compute itself."""

from pathlib import Path

# Device files of NVIDIA's driver on Linux, and of the GPU in Windows' Linux.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def may_have_gpu() -> bool:
    """Return whether this machine has a GPU's driver. Torch may have been built without support for it."""
    return any(driver.exists() for driver in _DRIVERS)
