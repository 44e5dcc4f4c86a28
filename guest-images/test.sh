#!/usr/bin/env bash
# Boots the guest under the QEMU that the project uses, with an ordinary NIC, and tries what it must have.
# shellcheck disable=SC2016  # the commands expand in the guest
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
qemu=$("$here/get-qemu.sh" | tail -n1)
image=$("$here/build-guest.sh" | tail -n1)
work=$(mktemp -d /tmp/distdpu-guest.XXXXXX)
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT
passed=0 failed=0
check() { # STATUS COMMAND: the command ends with that status in the guest
  local status=0
  python3 "$here/guestctl.py" --socket "$work/ctl" run "$2" >"$work/out" 2>&1 || status=$?
  if [ "$status" = "$1" ]; then
    passed=$((passed + 1))
    echo "ok $2"
  else
    failed=$((failed + 1))
    echo "FAIL $2: status $status, not $1: $(tail -n3 "$work/out")"
  fi
}

begin=$(date +%s%N)
"$qemu" -accel tcg -cpu max -machine q35 -m 512M -nodefaults -display none \
  -kernel "$image/vmlinuz" -initrd "$image/initramfs.cpio.lz4" \
  -append "console=ttyS0 quiet dpu.ctl=ttyS1 dpu.name=test dpu.ip=10.0.0.1/24 dpu.mtu=1400 dpu.rxe=1" \
  -serial "file:$work/console" -chardev "socket,id=ctl,path=$work/ctl,server=on,wait=off" -serial chardev:ctl \
  -netdev hubport,id=n0,hubid=0 -device virtio-net-pci,netdev=n0 >"$work/qemu" 2>&1 &
pid=$!
python3 "$here/guestctl.py" --socket "$work/ctl" wait-ready --timeout 120 || {
  tail -n 20 "$work/qemu" "$work/console"
  echo "FAIL boot"
  exit 1
}
echo "ok boot: ready after $((($(date +%s%N) - begin) / 1000000)) ms"
check 0 true
check 7 'exit 7'
check 0 'test "$(hostname)" = test && ip addr show eth0 | grep -q 10.0.0.1/24 && ip link show eth0 | grep -q "mtu 1400"'
check 0 'rdma link show rxe0/1 | grep -q netdev'
check 0 'ib_write_bw --version; ib_write_bw --help | grep -q size'
check 0 'iperf3 --version && ethtool --version && lspci -n && ibv_devices | grep rxe0'
check 0 'modprobe mlx5_core && modprobe mlx5_ib && modprobe vfio_pci'
check 0 'test "$(head -c 300000 /dev/zero | wc -c)" = 300000; head -c 300000 /dev/zero | tr "\0" x'
[ "$(wc -c <"$work/out")" = 300000 ] || { failed=$((failed + 1)); echo "FAIL output of 300000 bytes arrived as $(wc -c <"$work/out")"; }
python3 "$here/guestctl.py" --socket "$work/ctl" run --timeout 5 'poweroff -f' >/dev/null 2>&1 || true
for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
if kill -0 "$pid" 2>/dev/null; then
  failed=$((failed + 1))
  echo "FAIL poweroff"
else
  passed=$((passed + 1))
  pid=
  echo "ok poweroff"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
