#!/usr/bin/env bash
# Builds Linux's erdma driver as a module for a guest's kernel, unmodified from Debian's own source package: Debian's
# kernels leave it out. Prints, as the last line on stdout, the folder that holds erdma.ko.
#   VERSION     the kernel's, as `uname -r` prints it (7.3 or newer for rdma_cm)
#   --refresh   make it anew
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
version=''
while [ $# -gt 0 ]; do
  case $1 in
    --refresh) refresh=1 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown argument \`$1\`; there are VERSION and --refresh" ;;
    *) version=$1 ;;
  esac
  shift
done
[[ $version =~ ^([0-9]+\.[0-9]+)[0-9.]*[+a-z0-9~]*-[a-z0-9-]+$ ]] || die "\`$version\` is no version of a Debian kernel"
series=${BASH_REMATCH[1]}

# What the module is built with, of the guest's own suite: the host's C library may be too old for the kernel's tools.
tools=gcc-14,make,libelf1t64,dash,bash,coreutils,sed,grep,mawk,findutils,kmod

# The kernel's headers depend on the kernel itself, which is not needed: they are fetched by apt, which checks their
# signatures, and unpacked without what they depend on.
fetch_kernel_packages() {
  local packages="linux-headers-$version linux-headers-${version%-*}-common linux-kbuild-${version%-*} linux-source-$series"
  printf '%s' "mkdir \"\$1/debs\" && cd \"\$1/debs\" && APT_CONFIG=\"\$MMDEBSTRAP_APT_CONFIG\" apt-get download $packages"
}

# in_chroot ROOT COMMAND...: in a mount namespace of its own, so that what it mounts ends with it.
in_chroot() {
  local own=()
  [ "$(id -u)" = 0 ] || own=(--map-root-user)
  # shellcheck disable=SC2016  # the inner shell fills in its arguments
  watched "still building the module" "$log" unshare --mount "${own[@]}" sh -euc '
    root=$1
    shift
    mount --rbind /proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" "$@"' sh "$@"
}

make_module() {
  need mmdebstrap:mmdebstrap xz:xz-utils unshare:util-linux
  local root=$work/root source=linux-source-$series deb
  say "getting the sources of kernel $version and a compiler (about 270 MB, a minute or two)"
  backports=1
  unpack "$root" "$tools" --extract-hook="$(fetch_kernel_packages)"
  for deb in "$root"/debs/linux-headers-*.deb "$root"/debs/linux-kbuild-*.deb; do
    dpkg -x "$deb" "$root" 2>>"$log" || die "could not unpack ${deb##*/} (log: $log)"
  done
  dpkg --fsys-tarfile "$root"/debs/"$source"_*.deb | tar -xO "./usr/src/$source.tar.xz" \
    | tar -C "$root" -xJ --strip-components=4 "$source/drivers/infiniband/hw/erdma" || die "there is no erdma in $source"
  rm -rf "$root/debs"
  mkdir -p "$root/proc" "$root/dev" "$root/tmp"
  [ -e "$root/usr/bin/awk" ] || ln -s mawk "$root/usr/bin/awk"
  say "building erdma.ko"
  # Types for tracing would need the whole kernel.
  in_chroot "$root" make -s -j2 -C "/usr/src/linux-headers-$version" M=/erdma CONFIG_INFINIBAND_ERDMA=m \
    CONFIG_DEBUG_INFO_BTF_MODULES= modules || die "erdma cannot be built for kernel $version: $(cause "$log") (log: $log)"
  strip -g -o "$work/erdma.ko" "$root/erdma/erdma.ko" 2>>"$log" || cp "$root/erdma/erdma.ko" "$work/erdma.ko"
}

begin "erdma-$version" "$here/build-erdma.sh" "$here/common.sh"
if [ "$fresh" = yes ]; then
  make_module
  publish
fi
printf '%s\n' "$out"
