#!/usr/bin/env bash
# The newcomer's first run: ./run-vm.sh of the last commit in a minimal Debian where nothing was installed and
# nothing is cached, on a root file system of its own, and how long it took. Needs root, and packages from the network.
#   tests/fresh-machine.sh [--user] [SUITE [RUN-VM-OPTION...]]     SUITE: bookworm, trixie (default)
# --user: run-vm.sh runs without root; root only installs the packages that it names.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=guest-images/common.sh
. "$tree/guest-images/common.sh"
user=
if [ "${1:-}" = --user ]; then user=dpu; shift; fi
suite=${1:-trixie}
shift $(($# > 0 ? 1 : 0))
case $suite in
  bookworm | trixie) ;;
  *) die "there is no suite \`$suite\`; there are bookworm and trixie" ;;
esac
[ "$(id -u)" = 0 ] || die "a root file system of its own needs root"
need mmdebstrap:mmdebstrap git:git

work=$(mktemp -d "${TMPDIR:-/tmp}/distdpu-fresh.XXXXXX")
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
trap 'die "a step failed at line $LINENO"' ERR
root=$work/root log=$work/log
say "making a minimal Debian $suite"
mmdebstrap --variant=minbase --include=ca-certificates --aptopt='Acquire::Languages "none"' --keyring="$keyring" \
  "$suite" "$root" "$(mirrors | head -n1)" >"$log" 2>&1 || { cat "$log" >&2; die "cannot make it: $(cause "$log")"; }
# How this host reaches the network is not part of the test.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
mkdir -p "$root/usr/local/share/ca-certificates" "$root/etc/apt/apt.conf.d"
cp -r /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
env -u TMPDIR chroot "$root" update-ca-certificates >>"$log" 2>&1 || die "update-ca-certificates: $(tail -n1 "$log")"
mkdir "$root/root/distdpu"
git -C "$tree" archive HEAD | tar -x -C "$root/root/distdpu"

cat >"$root/root/first-run" <<'SH'
#!/bin/sh
# first-run USER RUN-VM-OPTION...; without USER as root
user=$1
shift
if [ -z "$user" ]; then
  cd /root/distdpu && exec ./run-vm.sh "$@"
fi
useradd --create-home --shell /bin/bash "$user"
cp -r /root/distdpu "/home/$user/" && chown -R "$user:" "/home/$user/distdpu"
apt-get update >/dev/null
# One after the other, as a person would who reads the message.
for try in 1 2 3 4 5 6 7 8 9 10; do
  status=0
  setpriv --reuid "$user" --regid "$user" --init-groups env HOME="/home/$user" USER="$user" \
    sh -c 'cd "$HOME/distdpu" && exec ./run-vm.sh "$@"' sh "$@" 2>/tmp/said || status=$?
  cat /tmp/said >&2
  packages=$(sed -n 's/.*sudo apt-get install \([a-z0-9 .+-]*\).*/\1/p' /tmp/said | tail -n1)
  if [ "$status" = 0 ] || [ -z "$packages" ]; then exit "$status"; fi
  echo "== root installs what was named: $packages (run $try)" >&2
  # shellcheck disable=SC2086  # a list
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages >/tmp/apt.log 2>&1 || { tail /tmp/apt.log >&2; exit 1; }
done
exit 1
SH
chmod +x "$root/root/first-run"

say "running ./run-vm.sh in it${user:+ as a user}"
begin=$SECONDS status=0
# shellcheck disable=SC2016  # the shells inside fill in the names
# The mounts end with the command, and so does all that it started.
env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" unshare --mount --pid --fork --kill-child sh -c '
  cd "$1" && shift && mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs tmp &&
  exec chroot . /root/first-run "$@"' sh "$root" "$user" "$@" || status=$?
say "run-vm.sh on a fresh Debian $suite ended with status $status after $((SECONDS - begin)) s"
exit "$status"
