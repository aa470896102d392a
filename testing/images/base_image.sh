#!/usr/bin/env bash
# Makes an image like python:3.11-slim-bookworm of Debian's packages: base_image.sh IMAGE. Needs root.
set -euo pipefail
image=$1
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
root=$(mktemp -d /var/tmp/loraplex-base.XXXXXX)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$mirror"
# `python` and `pip` in /usr/local/bin, as in the official image.
chroot "$root" python3 -m venv --copies /usr/local
# Certificates that this machine trusts, for a network with a proxy of its own.
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
container=$(buildah from scratch)
buildah copy --quiet "$container" "$root" / > /dev/null
buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin --env LANG=C.UTF-8 --cmd python "$container"
buildah commit --quiet --rm "$container" "$image" > /dev/null
