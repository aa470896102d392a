"""The table of devices: every kind has its platform."""

import pytest
import torch

from kernels.devices import DEVICES, KINDS, DeviceKind, kind_of
from kernels.platform import default_device, platform_of


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.torch_type)
def test_a_kind_and_its_platform_agree(kind: DeviceKind) -> None:
    assert platform_of(torch.device(kind.torch_type)).is_host == kind.is_host


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="device: expected one of cpu, cuda, meta, got xla"):
        platform_of(torch.device("xla"))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_is_the_gpu_of_a_machine_that_has_one(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceKind, "may_exist", lambda kind: kind.is_host or has_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    expected = "cuda" if has_gpu else "cpu"
    assert kind_of("auto") is DEVICES[expected]
    assert default_device() == torch.device(expected)
