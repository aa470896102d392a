"""The built images run the demo of docker-compose.yml: deploy/try_images.sh."""

import os
import shutil
import subprocess
import sys

import pytest

from testing.stack import ROOT


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_images_are_built_and_run_the_demo():
    missing = [tool for tool in ("buildah", "debootstrap", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'buildah'}")
    command = ["bash", str(ROOT / "deploy/try_images.sh")]
    ran = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr).decode()[-4000:]
    assert b"everything works" in ran.stdout
