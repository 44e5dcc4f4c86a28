#!/usr/bin/env bash
# The newcomer's first run: ./run-vm.sh of the last commit in a minimal Debian where nothing was installed and
# nothing is cached, on a root file system of its own, and how long it took. Needs root, and packages from the network.
#   tests/fresh-machine.sh [SUITE [RUN-VM-OPTION...]]     SUITE: bookworm, trixie (default)
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=guest-images/common.sh
. "$tree/guest-images/common.sh"
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

say "running ./run-vm.sh in it"
begin=$SECONDS status=0
# shellcheck disable=SC2016  # the shells inside fill in the names
# The mounts end with the command, and so does all that it started.
env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" unshare --mount --pid --fork --kill-child sh -c '
  cd "$1" && shift && mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs tmp &&
  exec chroot . sh -c "cd /root/distdpu && exec ./run-vm.sh \"\$@\"" sh "$@"' sh "$root" "$@" || status=$?
say "run-vm.sh on a fresh Debian $suite ended with status $status after $((SECONDS - begin)) s"
exit "$status"
