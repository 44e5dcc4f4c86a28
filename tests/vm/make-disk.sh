#!/usr/bin/env bash
# Makes a disk as a user would bring it: Debian with systemd, cloud-init and a boot loader, in one partition.
# Prints, as the last line on stdout, the folder that holds
#   disk.raw             the disk
#   vmlinuz, initrd.img  its kernel, to start it without its boot loader
# Needs root or user namespaces: packages run their scripts. --refresh makes it anew from today's packages.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../../guest-images/common.sh"
[ "${1:-}" != --refresh ] || refresh=1
mib=700

make_disk() {
  need mmdebstrap:mmdebstrap mke2fs:e2fsprogs python3:python3
  local mirror made='' as_root=()
  # The boot loader's core finds the kernel by itself; nothing is installed to a device.
  printf '%s\n' 'serial --unit=0' 'terminal_output serial' \
    'linux (hd0,msdos1)/vmlinuz root=/dev/vda1 rw console=ttyS0' 'initrd (hd0,msdos1)/initrd.img' 'boot' \
    >"$work/grub.cfg"
  say "installing Debian $suite with cloud-init for a test disk (a minute or two)"
  # shellcheck disable=SC2016  # for the shell that runs the hook
  while read -r mirror; do
    rm -f "$work/root.tar"
    if watched "still installing" "$log" mmdebstrap --variant=essential --format=tar --architectures=amd64 \
      --include=systemd-sysv,cloud-init,linux-image-cloud-amd64,udev,iproute2,iputils-ping,netbase,grub-pc-bin,zstd \
      --keyring="$keyring" --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
      --dpkgopt='path-exclude=/usr/share/man/*' \
      --customize-hook="copy-in '$work/grub.cfg' /boot" \
      --customize-hook='chroot "$1" grub-mkimage -O i386-pc -p /boot -c /boot/grub.cfg -o /boot/core.img biosdisk part_msdos ext2 linux serial terminal boot' \
      --customize-hook='chroot "$1" systemctl enable systemd-networkd' \
      --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
      "$suite" "$work/root.tar" "deb [signed-by=$keyring] $mirror $suite main"; then
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
    echo "/dev/vda1 / ext4 defaults 0 1" >"$1/root/etc/fstab"
    truncate -s "$2M" "$1/part"
    mke2fs -q -t ext4 -O "^metadata_csum_seed" -d "$1/root" "$1/part"
    cp "$1/root/boot/core.img" "$1/root/usr/lib/grub/i386-pc/boot.img" "$1"
    cp "$1"/root/boot/vmlinuz-* "$1/vmlinuz"
    cp "$1"/root/boot/initrd.img-* "$1/initrd.img"
    rm -rf "$1/root"' sh "$work" "$mib" >>"$log" 2>&1 || die "could not make the file system (log: $log)"
  # The boot sector with a partition table, the core behind it, the partition at 1 MiB.
  python3 - "$work" "$mib" <<'PY' || die "could not make the disk"
import struct, sys
work, sectors = sys.argv[1], int(sys.argv[2]) * 2048
boot = bytearray(open(f"{work}/boot.img", "rb").read()[:512])
boot[440:510] = bytes(70)
struct.pack_into("<B3sB3sII", boot, 446, 0x80, b"\0\2\0", 0x83, b"\xff\xff\xff", 2048, sectors)
core = open(f"{work}/core.img", "rb").read()
assert len(core) < 2047 * 512, "the boot loader does not fit before the partition"
with open(f"{work}/disk.raw", "wb") as disk:
    disk.write(boot + core)
    disk.truncate((2048 + sectors) * 512)
PY
  dd if="$work/part" of="$work/disk.raw" bs=1M seek=1 conv=notrunc,sparse status=none
  chmod 644 "$work/disk.raw" "$work/vmlinuz" "$work/initrd.img"
  rm -f "$work/part" "$work/core.img" "$work/boot.img" "$work/grub.cfg"
}

begin disk "${BASH_SOURCE[0]}" "$here/common.sh"
if [ "$fresh" = yes ]; then
  make_disk
  publish
fi
printf '%s\n' "$out"
