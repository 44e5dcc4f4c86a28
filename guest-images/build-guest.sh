#!/usr/bin/env bash
# Makes the guest: a stock Debian kernel and an initramfs with perftest, rdma-core and network tools. Prints, as
# the last line on stdout, the folder that holds
#   vmlinuz              the kernel as packaged
#   vmlinux              the same kernel unpacked, which QEMU starts directly (PVH) and sooner
#   initramfs.cpio.lz4   the root
# --kernel backports   the kernel of trixie-backports (7.0 or newer), and guest-images/gpudirect.c as a program
# --erdma     that kernel and Linux's erdma driver for it, which Debian's kernels leave out; see build-erdma.sh
# --out DIR   copy them to DIR as well, and print DIR
# --refresh   make the guest anew from today's packages
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
copy='' backports='' erdma='' programs=()
while [ $# -gt 0 ]; do
  case $1 in
    --out)
      copy=${2:?--out needs a folder}
      shift
      ;;
    --kernel)
      [ "${2:-}" = backports ] || die "--kernel is \`${2:-}\`; it can be backports"
      backports=1
      shift
      ;;
    --erdma) erdma=1 ;;
    --refresh) refresh=1 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument \`$1\`; there are --kernel backports, --erdma, --out DIR and --refresh" ;;
  esac
  shift
done

packages=linux-image-amd64,busybox-static,dash,bash,kmod,iproute2,ethtool,pciutils,iputils-ping,iperf3,tcpdump
packages+=,util-linux,procps,perftest,rdma-core,ibverbs-utils,ibverbs-providers,rdmacm-utils
modules="virtio_pci virtio_net virtio_blk 8021q bridge tun veth dummy rdma_rxe ib_uverbs rdma_ucm ib_umad"
modules+=" mlx5_core mlx5_ib vfio_pci vfio_iommu_type1 ext4 squashfs overlay crc32_generic crc32c_generic"

name=guest options=()
if [ -n "$erdma" ]; then
  [ -z "$backports" ] || die "--erdma is the kernel of backports already; leave --kernel away"
  name=guest-erdma backports=1
  # Other kernels bring it along.
  packages+=,coreutils
elif [ -n "$backports" ]; then
  name=guest-backports
  programs=("$here/gpudirect.c")
  packages+=,libc6-dev,libibverbs-dev
fi

# The kernel and what it needs come from backports, nothing else does.
pin_kernel() {
  [ -n "$backports" ] || return 0
  printf 'Package: linux-image-* linux-base\nPin: release n=%s-backports\nPin-Priority: 900\n' "$suite" >"$work/preferences"
  options+=(--setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\" && cp '$work/preferences' \"\$1/etc/apt/preferences.d/backports\"")
}

# Builds programs against the guest's own libraries.
build_programs() {
  local source libraries=$root/usr/lib/x86_64-linux-gnu
  for source in "${programs[@]}"; do
    # Without -B and -L the host's own C library would come first.
    cc -O2 -Wall --sysroot="$root" -B"$libraries/" -L"$libraries" -o "$root/usr/bin/$(basename "$source" .c)" "$source" -libverbs >>"$log" 2>&1 \
      || die "$source cannot be built (log: $log)"
  done
  [ ${#programs[@]} = 0 ] || find "$root/usr/lib" \( -name '*.a' -o -name '*.o' \) -delete
}

# unpack_kernel BZIMAGE ELF: the zstd payload of a bzImage, found by its boot header (Documentation/arch/x86/boot.rst:
# setup_sects, payload_offset, payload_length). A kernel packed otherwise is used as it is.
unpack_kernel() {
  number() { od -An -tu"$2" -j "$1" -N "$2" "$3" | tr -d ' '; }
  local start length
  start=$((($(number $((0x1f1)) 1 "$1") + 1) * 512 + $(number $((0x248)) 4 "$1")))
  length=$(number $((0x24c)) 4 "$1")
  # The last four bytes are the unpacked size, which zstd does not know.
  dd if="$1" iflag=skip_bytes,count_bytes skip="$start" count=$((length - 4)) bs=1M status=none 2>>"$log" \
    | zstd -dcq >"$2" 2>>"$log" || cp "$1" "$2"
}

make_guest() {
  need mmdebstrap:mmdebstrap cpio:cpio lz4:lz4 xz:xz-utils zstd:zstd depmod:kmod
  [ ${#programs[@]} = 0 ] || need cc:gcc
  root=$work/root

  say "getting Debian $suite packages for the guest (about 150 MB, a minute or two)"
  pin_kernel
  unpack "$root" "$packages" "${options[@]}"
  build_programs

  version=$(basename "$(echo "$root"/usr/lib/modules/* "$root"/lib/modules/* | tr ' ' '\n' | grep -v '\*' | head -n1)")
  [ -n "$version" ] || die "the kernel package has no modules (log: $log)"
  # In /boot, or with the modules as packages since 7 have it.
  cp "$(find "$root/boot" "$root/usr/lib/modules" -maxdepth 2 -name 'vmlinuz*' 2>/dev/null | head -n1)" "$work/vmlinuz"
  unpack_kernel "$work/vmlinuz" "$work/vmlinux"

  say "picking modules of kernel $version"
  depmod -b "$root" "$version" 2>>"$log"
  all=$root/lib/modules/$version
  # Every wanted module with all it needs, as modules.dep lists them.
  wanted=$(awk -v want="$modules" '
    { file = $1; sub(/:$/, "", file); n = file; sub(/.*\//, "", n); sub(/\.ko.*/, "", n); gsub(/-/, "_", n)
      path[n] = file; needs[n] = $0; sub(/^[^:]*: */, "", needs[n]) }
    END { count = split(want, names, " ")
      for (i = 1; i <= count; i++) if (names[i] in path) { print path[names[i]]
        k = split(needs[names[i]], d, " "); for (j = 1; j <= k; j++) print d[j] } }' "$all/modules.dep" | sort -u)
  for must in virtio_net virtio_pci rdma_rxe mlx5_core mlx5_ib; do
    grep -qE "/$must\.ko|/${must//_/-}\.ko" <<<"$wanted" || grep -qE "/$must\.ko|/${must//_/-}\.ko" "$all/modules.builtin" \
      || die "kernel $version has no module $must (log: $log)"
  done
  mkdir "$work/modules"
  (cd "$all" && xargs cp --parents -t "$work/modules" modules.builtin modules.builtin.modinfo modules.order <<<"$wanted")
  find "$work/modules" -name '*.ko.xz' -exec xz -d {} +
  find "$work/modules" -name '*.ko.zst' -exec zstd -q -d --rm {} +
  rm -rf "${all:?}"
  mv "$work/modules" "$all"
  if [ -n "$erdma" ]; then
    built=$("$here/build-erdma.sh" ${refresh:+--refresh} "$version" | tail -n1)
    install -D -m 644 "$built/erdma.ko" "$all/updates/erdma.ko"
  fi
  depmod -b "$root" "$version" 2>>"$log"

  say "leaving out what the guest does not need"
  (
    cd "$root"
    rm -rf boot var usr/share usr/include usr/lib/systemd usr/lib/udev usr/lib/firmware usr/lib/python3* usr/lib/apt usr/lib/klibc \
      usr/lib/dpkg usr/lib/initramfs-tools usr/lib/dracut usr/lib/x86_64-linux-gnu/{perl*,gconv,security,systemd} \
      usr/bin/{perl*,systemctl,systemd*,journalctl,udevadm,openssl,dpkg*,apt*} usr/lib/x86_64-linux-gnu/libperl* usr/lib/file
    mkdir -p proc sys dev run tmp root etc var/tmp usr/share var/lib/misc
    find usr/lib/modules lib/modules -name '*.bin.tmp' -delete 2>/dev/null || true
    # busybox fills in what no package brought; a program of Debian's stays.
    for applet in $(usr/bin/busybox --list); do
      [ -e "usr/bin/$applet" ] || [ -L "usr/bin/$applet" ] || [ -e "usr/sbin/$applet" ] || [ -L "usr/sbin/$applet" ] \
        || ln -s busybox "usr/bin/$applet"
    done
    # busybox' own shell would take its applets before Debian's programs.
    ln -sf dash usr/bin/sh
    printf 'root::0:0:root:/root:/bin/bash\n' >etc/passwd
    printf 'root:x:0:\n' >etc/group
    printf '127.0.0.1 localhost\n::1 localhost\n' >etc/hosts
    install -m 755 "$here/init" init
    install -m 755 "$here/agent.sh" usr/bin/distdpu-agent
  )

  say "packing the initramfs"
  (cd "$root" && find . -print0 | LC_ALL=C sort -z | cpio --null -o -H newc -R 0:0 --reproducible --quiet) \
    | lz4 -l -9 -q >"$work/initramfs.cpio.lz4" || die "could not pack the initramfs"
  say "guest: kernel $version, initramfs $(du -h "$work/initramfs.cpio.lz4" | cut -f1)"
}

begin "$name" "$here/build-guest.sh" "$here/common.sh" "$here/init" "$here/agent.sh" "${programs[@]}" ${erdma:+"$here/build-erdma.sh"}
if [ "$fresh" = yes ]; then
  make_guest
  publish
fi
if [ -n "$copy" ]; then
  { mkdir -p "$copy" && cp "$out/vmlinuz" "$out/vmlinux" "$out/initramfs.cpio.lz4" "$copy/"; } \
    || die "cannot copy the guest to $copy; is it writable, with 100 MB free?"
  out=$(cd "$copy" && pwd)
fi
printf '%s\n' "$out"
