#!/usr/bin/env bash
# Prints the path of a qemu-system-x86_64 that has vfio-user-pci and is at least 10.1: the system's when it is
# good enough, otherwise one from Debian's trixie-backports, unpacked into the cache and started through its
# own loader. The path is the last line on stdout.
#   --own      do not look at the system's
#   --refresh  make the cached one anew from today's packages
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
minimum=10.1

version_of() { "$1" --version 2>/dev/null | sed -n '1s/.*version \([0-9.]*\).*/\1/p'; }
good() { # PROGRAM
  local version
  version=$(version_of "$1") || return 1
  [ -n "$version" ] && [ "$(printf '%s\n%s\n' "$minimum" "$version" | sort -V | head -n1)" = "$minimum" ] \
    && "$1" -device vfio-user-pci,help >/dev/null 2>&1
}

own=''
while [ $# -gt 0 ]; do
  case $1 in
    --own) own=1 ;;
    --refresh) own=1 refresh=1 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument \`$1\`; there are --own and --refresh" ;;
  esac
  shift
done
if [ -z "$own" ]; then
  system=$(command -v qemu-system-x86_64 || true)
  if [ -n "$system" ] && good "$system"; then
    printf '%s\n' "$system"
    exit 0
  fi
fi

name=qemu-system-x86_64
begin qemu "$here/get-qemu.sh" "$here/common.sh"
if [ "$fresh" = yes ]; then
  need mmdebstrap:mmdebstrap
  say "getting QEMU from Debian $suite-backports (about 100 MB, a minute or two)"
  # All of it from backports: QEMU and its firmware packages go together.
  printf 'Package: *\nPin: release n=%s-backports\nPin-Priority: 900\n' "$suite" >"$work/preferences"
  backports=1
  unpack "$work/sysroot" qemu-system-x86,seabios,ipxe-qemu \
    --setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\" && cp '$work/preferences' \"\$1/etc/apt/preferences.d/backports\""
  (cd "$work/sysroot" && rm -rf var boot usr/lib/systemd usr/lib/udev usr/include)
  cat >"$work/$name" <<'W'
#!/bin/sh
# QEMU in a folder of its own, started through its own loader.
dir=$(dirname "$(readlink -f "$0")")/sysroot
lib=$dir/usr/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --argv0 qemu-system-x86_64 --library-path "$lib:$lib/pulseaudio" \
  "$dir/usr/bin/qemu-system-x86_64" -L "$dir/usr/share/seabios" -L "$dir/usr/share/qemu" \
  -L "$dir/usr/lib/ipxe/qemu" "$@"
W
  chmod 755 "$work/$name"
  good "$work/$name" || {
    "$work/$name" --version >&2 || true
    die "the QEMU from $suite-backports does not start or has no vfio-user-pci (log: $log)"
  }
  say "QEMU $(version_of "$work/$name")"
  publish
fi
printf '%s\n' "$out/$name"
