#!/usr/bin/env bash
# Builds the images with deploy/Dockerfile and runs docker-compose.yml's demo in them, without Docker: start in order,
# health checks, the README's requests, stop, restart. Needs root, Debian's buildah and debootstrap, 10 GB of disk.
#
# PYTHON         a Python with the project's packages (default: .venv/bin/python)
# PYTHON_IMAGE   base image (default: made by debootstrap, once)
# TORCH_INDEX    package index for torch (default: the Dockerfile's)
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah debootstrap unshare nsenter curl; do
    command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install buildah debootstrap util-linux curl" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "needs root, for debootstrap and chroot" >&2; exit 1; }
exec "${PYTHON:-.venv/bin/python}" -m testing.images.try_images
