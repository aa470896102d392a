"""Settings that must stand before any test module is imported."""

import os

import pytest

# Triton reads it on import, whichever test imports triton first: interpreted where there is no NVIDIA device.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
# Triton 3.9 warns where nobody has chosen, and here warnings are errors. 1 is its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        for item in marked if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
