# shellcheck shell=bash
# What the image scripts share: progress, errors, the cache, and unpacking Debian packages.
# Sourced, not run.
# shellcheck disable=SC2034  # the scripts that source this use them

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${DISTDPU_CACHE:-$HOME/.cache/distdpu}
suite=trixie
mirror=${DISTDPU_MIRROR:-http://deb.debian.org/debian}
export PATH="$PATH:/usr/sbin:/sbin"

say() { printf '== %s\n' "$*" >&2; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# need PROGRAM:PACKAGE... installs what is missing when run as root, names it otherwise.
need() {
  local pair missing=()
  for pair in "$@"; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}"); done
  [ -f /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "these programs are missing: ${missing[*]}"
  [ "$(id -u)" = 0 ] || die "packages are missing: ${missing[*]}; run once as root, or: sudo apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  local log
  log=$(mktemp /tmp/distdpu-apt.XXXXXX)
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 || die "could not install ${missing[*]} (log: $log)"
  rm -f "$log"
}

# begin NAME VERSION INPUT... sets `out` (the finished folder) and `work` (the one being made), keyed by the
# content of the inputs. Prints the folder and ends the script when it is there already.
begin() {
  local name=$1 key
  shift
  key=$(cat "$@" | sha256sum | cut -c1-16)
  out=$cache/$name-$key
  mkdir -p "$cache"
  exec 9>"$cache/$name.lock"
  flock 9 || die "cannot lock $cache/$name.lock"
  if [ -e "$out/done" ] && [ -z "${refresh:-}" ]; then
    printf '%s\n' "${answer:+$out/}${answer:-$out}"
    exit 0
  fi
  rm -rf "$out"
  work=$(mktemp -d "$cache/$name.XXXXXX")
  log=$cache/$name.log
  trap 'rm -rf "$work"' EXIT
  trap 'die "a step failed at line $LINENO (log: $log)"' ERR
}

# finish publishes the folder and prints the answer.
finish() {
  rm -rf "$work/root" "$work/root.tar"
  touch "$work/done"
  chmod 755 "$work"
  mv "$work" "$out"
  trap - EXIT
  printf '%s\n' "${answer:+$out/}${answer:-$out}"
}

# unpack TARGET PACKAGES [MMDEBSTRAP-ARGUMENT...] unpacks packages with what they depend on, without running
# their scripts. apt checks the signatures. No root is needed.
unpack() {
  local target=$1 packages=$2
  shift 2
  if ! mmdebstrap --variant=extract --format=tar --architectures=amd64 --include="$packages" \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg "$@" >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    die "could not get the packages from $mirror; is the network up? (log: $log)"
  fi
  mkdir -p "$target"
  tar -C "$target" --no-same-owner --exclude='./dev/*' --exclude='./usr/share/doc' --exclude='./usr/share/man' \
    --exclude='./usr/share/locale' -xf "$work/root.tar" 2>>"$log" || die "could not unpack the packages (log: $log)"
  local link
  for link in bin sbin lib lib64; do [ -e "$target/$link" ] || ln -s "usr/$link" "$target/$link"; done
}
