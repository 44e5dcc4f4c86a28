#!/usr/bin/env bash
# Boots the guest under the QEMU that the project uses, with ordinary NICs, and tries what it must have and what
# its control port must do.
# shellcheck disable=SC2016  # the commands expand in the guest
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
qemu=$("$here/get-qemu.sh" | tail -n1)
image=$("$here/build-guest.sh" | tail -n1)
work=$(mktemp -d /tmp/distdpu-guest.XXXXXX)
pid=
cleanup() {
  [ -z "$pid" ] || { kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; } || true
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
passed=0 failed=0

# What the scripts take away, and what not; the mounts are seen by this one shell alone.
removes() { # SETUP CHECK
  unshare --user --map-root-user --mount bash -c '. "$1/common.sh"; mkdir -p "$2/gone/in"; eval "$3"; remove "$2/gone" 2>/dev/null; eval "$4"' \
    sh "$here" "$work" "$1" "$2"
}
guestctl() { PYTHONDONTWRITEBYTECODE=1 python3 "$here/guestctl.py" --socket "$work/ctl" "$@"; }
result() { # OK? TEXT [LOG]
  if [ "$1" = 0 ]; then
    passed=$((passed + 1))
    echo "ok $2"
  else
    failed=$((failed + 1))
    echo "FAIL $2${3:+: $(tail -n3 "$3")}"
  fi
}
check() { # STATUS COMMAND: the command ends with that status in the guest
  local status=0
  guestctl run "$2" >"$work/out" 2>&1 || status=$?
  result $((status != $1)) "$2 (status $status)" "$work/out"
}

status=0
removes '' '[ ! -e "$2/gone" ]' || status=1
result "$status" "a folder is removed"
status=0
mkdir "$work/host"
removes 'mount --bind "$2/host" "$2/gone/in"; echo >"$2/host/file"' '[ -e "$2/host/file" ]' || status=1
result "$status" "a folder with something mounted in it stays"

begin=$(date +%s%N)
"$qemu" -accel tcg -cpu max -machine q35 -m 512M -nodefaults -display none \
  -kernel "$image/vmlinux" -initrd "$image/initramfs.cpio.lz4" \
  -append "console=ttyS0 quiet mitigations=off tsc=unstable dpu.ctl=ttyS1 dpu.name=test dpu.ip=10.0.0.1/24 dpu.ip1=10.0.1.1/24 dpu.mtu=1400 dpu.rxe=1" \
  -serial "file:$work/console" -chardev "socket,id=ctl,path=$work/ctl,server=on,wait=off" -serial chardev:ctl \
  -netdev hubport,id=n0,hubid=0 -device virtio-net-pci,netdev=n0 \
  -netdev hubport,id=n1,hubid=1 -device virtio-net-pci,netdev=n1 >"$work/qemu" 2>&1 &
pid=$!
guestctl wait-ready --timeout 120 || {
  tail -n 20 "$work/qemu" "$work/console"
  echo "FAIL boot"
  exit 1
}
ticks=$(awk '{print $14 + $15}' "/proc/$pid/stat")
result 0 "boot: ready after $((($(date +%s%N) - begin) / 1000000)) ms, of these $((ticks * 1000 / $(getconf CLK_TCK))) ms of CPU"

check 0 true
check 7 'exit 7'
check 0 'test "$(hostname)" = test && ip addr show eth0 | grep -q 10.0.0.1/24 && ip link show eth0 | grep -q "mtu 1400"'
check 0 'ip addr show eth1 | grep -q 10.0.1.1/24 && ip addr show lo | grep -q 127.0.0.1'
check 0 'modprobe rdma_rxe && rdma link show rxe0/1 | grep -q eth0 && rdma link show rxe1/1 | grep -q eth1'
check 0 'ib_write_bw --version; ib_write_bw --help | grep -q size'
check 0 'iperf3 --version && ethtool --version && lspci -n && tcpdump --version && ibv_devices | grep rxe0'
check 0 'modprobe mlx5_core && modprobe mlx5_ib && modprobe vfio_pci && modprobe virtio_blk && modprobe squashfs'
check 0 'command -v flock pkill rdma ucmatose rping ibv_devinfo base64 setsid timeout >/dev/null'

guestctl run 'head -c 300000 /dev/zero | tr "\0" x' >"$work/out"
result $(($(wc -c <"$work/out") != 300000)) "output of 300000 bytes" "$work/out"
{ printf 'cat >/dev/null <<X\n' && head -c 40000 /dev/zero | tr '\0' y && printf '\nX\nexit 9\n'; } >"$work/script"
status=0
guestctl run "$(cat "$work/script")" || status=$?
result $((status != 9)) "a script of 40000 bytes"

status=0
guestctl run --timeout 3 'echo begun; sleep 7777' >"$work/out" || status=$?
result $((status != 124)) "status 124 when the time is up" "$work/out"
result $(($(grep -cx begun "$work/out") != 1)) "what a command printed before its time was up is there" "$work/out"
check 0 'for i in $(seq 50); do pgrep -f "^sleep 7777" >/dev/null || exit 0; sleep 0.2; done; exit 1'

# What a command prints arrives while it runs: it goes on only when the host has answered it.
: >"$work/out"
guestctl run --timeout 60 'echo first; while [ ! -e /tmp/go ]; do sleep 0.2; done' >"$work/out" &
runner=$!
for _ in $(seq 200); do [ ! -s "$work/out" ] || break; sleep 0.1; done
kill -0 "$runner" 2>/dev/null && result $(($(grep -cx first "$work/out") != 1)) "output streams" "$work/out"
kill -INT "$runner" 2>/dev/null || true
kill "$runner" 2>/dev/null || true
wait "$runner" 2>/dev/null || true
check 0 'touch /tmp/go'

PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$here python3 - "$work/ctl" <<'P' && status=0 || status=$?
import os, socket, sys
from guestctl import Guest, GuestError, TIMED_OUT
guest = Guest(sys.argv[1])
for i in range(30):
    assert guest.run(f"echo {i}; exit {i}") == (i, f"{i}\n"), f"connection {i}"
with socket.socket(socket.AF_UNIX) as noise:
    noise.connect(sys.argv[1])
    noise.sendall(os.urandom(3000) + b"\nRUN abc ????\nRUN\nOUT 1 2\nPING\nWAIT x y z\nKILL nothing")
assert guest.run("printf '\\303\\244'") == (0, "\u00e4"), "after noise"
one = guest.spawn("echo one; sleep 3; exit 3")
two = guest.spawn("echo two; sleep 8888")
assert guest.run("echo beside") == (0, "beside\n"), "beside spawned commands"
assert guest.wait(one) == (3, "one\n"), "wait"
assert guest.wait(two, 2) == (TIMED_OUT, "two\n"), "wait that is too short"
guest.kill(two)
assert guest.wait(two)[1] == "two\n", "wait after kill"
assert guest.run("pgrep -f '^sleep 8888'")[0] == 1, "killed"
try:
    guest.wait(one)
    raise AssertionError("an id is used up")
except GuestError:
    pass
P
result "$status" "reconnecting, noise, spawn, wait and kill"

guestctl run --timeout 10 'poweroff -f' >"$work/out" 2>&1 && status=0 || status=$?
result $((status != 125)) "status 125 when the guest goes away" "$work/out"
for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
status=1
kill -0 "$pid" 2>/dev/null || status=0 pid=
result "$status" "poweroff"
guestctl run true >"$work/out" 2>&1 && status=0 || status=$?
result $((status != 125)) "$(cat "$work/out")" "$work/out"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
