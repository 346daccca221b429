#!/usr/bin/env bash
# Make the image debian:bookworm-slim from Debian's own packages, for a machine that cannot pull it.
#
#   sudo deploy/image/base.sh podman      (or docker)
#
# Needs root, debootstrap and one of Debian's mirrors.
set -euo pipefail
engine=${1:?which container engine: docker or podman}
root=$(mktemp --directory)
trap 'rm -rf "$root"' EXIT

debootstrap --variant=minbase bookworm "$root" >&2

# As in the real one: no documents, nothing left of downloads, now or later.
rm -rf "$root"/usr/share/{doc,info,locale,man}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*
cat > "$root/etc/apt/apt.conf.d/docker-clean" <<'CONF'
APT::Keep-Downloaded-Packages "false";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };
CONF
cat > "$root/etc/dpkg/dpkg.cfg.d/docker" <<'CONF'
path-exclude /usr/share/doc/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
CONF

tar --directory "$root" --create . | "$engine" import - debian:bookworm-slim
