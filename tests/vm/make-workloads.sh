#!/usr/bin/env bash
# Makes a disk with what people run over RDMA: qperf, UCX, Open MPI with mpi4py, pyverbs and rdma-core's own tests.
# Guests mount it read-only beside their lean root. Prints, as the last line on stdout, the folder that holds
#   workloads.img   the disk: one ext4 file system
# Needs root or user namespaces: packages run their scripts. --refresh makes it anew from today's packages.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../guest-images/common.sh"
[ "${1:-}" != --refresh ] || refresh=1
packages=qperf,ucx-utils,openmpi-bin,openssh-server,openssh-client,python3-mpi4py,python3-numpy,python3-pyverbs
packages+=,rdma-core,ibverbs-providers,ibverbs-utils,rdmacm-utils,perftest,iproute2,iputils-ping,procps

make_workloads() {
  need mmdebstrap:mmdebstrap mke2fs:e2fsprogs
  local mirror made='' as_root=()
  say "installing Debian $suite with qperf, UCX and Open MPI for a test disk (some minutes)"
  # The keys guard nothing: they let the guests of one lab start each other's MPI processes.
  # shellcheck disable=SC2016  # for the shell that runs the hook
  while read -r mirror; do
    rm -f "$work/root.tar"
    if watched "still installing" "$log" mmdebstrap --variant=apt --format=tar --architectures=amd64 \
      --include="$packages" --keyring="$keyring" \
      --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
      --dpkgopt='path-exclude=/usr/share/man/*' \
      --customize-hook='chroot "$1" sh -ec "cd /root && apt-get source -qq --download-only --tar-only rdma-core"' \
      --customize-hook='mkdir "$1/root/source" && tar -C "$1/root/source" --strip-components=1 -xf "$1"/root/rdma-core_*.orig.tar.* && mv "$1/root/source/tests" "$1/root/tests" && rm -rf "$1"/root/source "$1"/root/rdma-core_*' \
      --customize-hook='chroot "$1" sh -ec "mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N \"\" -f /root/.ssh/id_ed25519 && cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys && ssh-keygen -q -A"' \
      --customize-hook='printf "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n" >"$1/root/.ssh/config"' \
      --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/usr/share/perl' \
      "$suite" "$work/root.tar" "deb [signed-by=$keyring] $mirror $suite main" "deb-src [signed-by=$keyring] $mirror $suite main"; then
      made=yes
      break
    fi
    say "$mirror did not do: $(cause "$log")"
  done < <(mirrors)
  [ -n "$made" ] || die "could not install Debian $suite: $(cause "$log") (log: $log)"

  # Files keep their owners only for root, if only root of a namespace.
  [ "$(id -u)" = 0 ] || as_root=(unshare --map-root-user --map-auto)
  # shellcheck disable=SC2016  # for the inner shell
  "${as_root[@]}" sh -ec '
    mkdir "$1/root" && tar -C "$1/root" --exclude="./dev/*" -xf "$1/root.tar"
    truncate -s "$(($(du -sm "$1/root" | cut -f1) * 5 / 4 + 64))M" "$1/workloads.img"
    mke2fs -q -t ext4 -O "^has_journal,^metadata_csum_seed" -d "$1/root" "$1/workloads.img"
    rm -rf "$1/root"' sh "$work" >>"$log" 2>&1 || die "could not make the file system (log: $log)"
  chmod 644 "$work/workloads.img"
}

begin workloads "${BASH_SOURCE[0]}" "$here/common.sh"
if [ "$fresh" = yes ]; then
  make_workloads
  publish
fi
printf '%s\n' "$out"
