# shellcheck shell=bash
# What the image scripts share: progress, errors, the cache, and unpacking Debian packages.
# Sourced, not run.
# shellcheck disable=SC2034  # the scripts that source this use them

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${DISTDPU_CACHE:-$HOME/.cache/distdpu}
suite=trixie
default_mirror=http://deb.debian.org/debian
refresh='' work='' child=''
export PATH="$PATH:/usr/sbin:/sbin" LC_ALL=C.UTF-8
set -E

say() { printf '== %s\n' "$*" >&2; }
die() {
  trap - ERR
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# usage prints the comment at the top of the script.
usage() { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"; }

# need PROGRAM:PACKAGE... installs what is missing when run as root, names it otherwise.
need() {
  local pair missing=() apt_log
  for pair in "$@"; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}"); done
  [ -f "$keyring" ] || missing+=(debian-archive-keyring)
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get to install them: ${missing[*]}"
  [ "$(id -u)" = 0 ] || die "packages are missing: ${missing[*]}; run once as root, or: sudo apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  apt_log=$(mktemp /tmp/distdpu-apt.XXXXXX)
  watched "still installing" "$apt_log" sh -c \
    'apt-get update && DEBIAN_FRONTEND=noninteractive exec apt-get install -y --no-install-recommends "$@"' \
    sh "${missing[@]}" || die "could not install ${missing[*]}: $(cause "$apt_log") (log: $apt_log)"
  rm -f "$apt_log"
}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$keyring" ] || [ ! -f "${keyring%.gpg}.pgp" ] || keyring=${keyring%.gpg}.pgp

# watched WHAT LOG COMMAND... runs a long command, says every 20 s that it is at it, and can be interrupted.
watched() {
  local what=$1 to=$2 begin=$SECONDS next=$((SECONDS + 20))
  shift 2
  "$@" >>"$to" 2>&1 9>&- &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    if [ "$SECONDS" -ge "$next" ]; then
      say "$what ($((SECONDS - begin)) s, log: $to)"
      next=$((SECONDS + 20))
    fi
  done
  local status=0
  wait "$child" || status=$?
  child=
  return "$status"
}

# cause LOG: the line of a log that most likely says why a step failed.
cause() {
  local line
  line=$(grep -aE '^(E:|W: .*signature|.*No space left|.*NO_PUBKEY)' "$1" | grep -av 'mmdebstrap failed\|apt-get .* failed' | tail -n1)
  [ -n "$line" ] || line=$(tail -n1 "$1")
  printf '%s' "$line"
}

# remove FOLDER with all that is in it. One in which something is still mounted stays: a killed helper may have left the
# host's own folders in it.
remove() {
  local folder
  folder=$(realpath -m -- "$1")
  if folder=$folder awk 'index($2 "/", ENVIRON["folder"] "/") == 1 { found = 1 } END { exit found }' /proc/self/mounts; then
    rm -rf --one-file-system -- "$folder"
  else
    say "$folder stays: something is mounted in it (see /proc/self/mounts)"
  fi
}

cleanup() {
  local status=$?
  trap - ERR
  # The child takes down what it has set up itself.
  [ -z "$child" ] || { kill "$child" 2>/dev/null && wait "$child" 2>/dev/null; } || true
  [ -z "$work" ] || remove "$work"
  return "$status"
}

# begin NAME INPUT... looks for a finished folder keyed by the content of the inputs, and sets `out` to it and
# `fresh` to yes or no. When it is not there (or `refresh` is set), `work` is the folder to make it in.
begin() {
  local name=$1 key
  shift
  key=$(cat "$@" | sha256sum | cut -c1-16)
  out=$cache/$name-$key
  log=$cache/$name.log
  mkdir -p "$cache" || die "cannot make the cache folder $cache; set DISTDPU_CACHE to one that can be written to"
  fresh=no
  if [ -e "$out/done" ] && [ -z "$refresh" ]; then
    touch "$out/done" 2>/dev/null || true
    return
  fi
  exec 9>"$cache/$name.lock" || die "cannot write to the cache folder $cache; set DISTDPU_CACHE to another"
  if ! flock -n 9; then
    say "another $name is being made; waiting for it"
    flock 9
    [ ! -e "$out/done" ] || return 0
  fi
  fresh=yes
  trap cleanup EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  trap '[ "$BASH_SUBSHELL" != 0 ] || die "a step failed at line $LINENO (log: $log)"' ERR
  work=$(mktemp -d "$cache/$name.XXXXXX")
  : >"$log"
}

# publish puts the finished folder in its place and throws out those that nobody has asked for in 30 days.
publish() {
  local old name=${out##*/}
  remove "$work/root"
  rm -f "$work/root.tar"
  touch "$work/done"
  chmod 755 "$work"
  [ ! -e "$out" ] || mv "$out" "$work.old"
  mv "$work" "$out"
  rm -rf "$work.old"
  work=
  for old in "$cache/${name%-*}"-*/done; do
    [ -z "$(find "$old" -mtime +30 2>/dev/null)" ] || rm -rf "${old%/done}"
  done
}

# mirrors prints where to get Debian from: the mirror of the host's own apt first, when it has one for Debian,
# then Debian's public one.
mirrors() {
  if [ -n "${DISTDPU_MIRROR:-}" ]; then
    printf '%s\n' "$DISTDPU_MIRROR"
    return
  fi
  {
    # shellcheck disable=SC2016  # apt fills in the names
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null \
      | grep -E '^https?://.*/debian/?$' | head -n1 | sed 's,/$,,' || true
    printf '%s\n' "$default_mirror"
  } | awk '!seen[$0]++'
}

# unpack TARGET PACKAGES [MMDEBSTRAP-OPTION...] unpacks packages of the suites with what they depend on, without
# running their scripts. apt checks the signatures. Nothing is mounted and no root is needed.
unpack() {
  local target=$1 packages=$2 mirror mode=auto got='' suites=("$suite") extra
  shift 2
  [ -z "${backports:-}" ] || suites+=("$suite-backports")
  # Without root, user namespaces may be closed; unpacking alone needs none.
  [ "$(id -u)" = 0 ] || mode=chrootless
  while read -r mirror; do
    extra=()
    local name
    for name in "${suites[@]}"; do extra+=("deb [signed-by=$keyring] $mirror $name main"); done
    rm -f "$work/root.tar"
    if watched "still getting packages" "$log" mmdebstrap --mode="$mode" --variant=extract --format=tar \
      --architectures=amd64 --include="$packages" --keyring="$keyring" --aptopt='Acquire::Languages "none"' \
      --aptopt='Acquire::Retries "3"' "$@" "$suite" "$work/root.tar" "${extra[@]}"; then
      got=yes
      break
    fi
    say "$mirror did not do: $(cause "$log")"
  done < <(mirrors)
  if [ -z "$got" ]; then
    ! grep -qaE 'NO_PUBKEY|Missing key|not signed' "$log" \
      || die "the signatures of Debian $suite cannot be checked; is debian-archive-keyring up to date? (log: $log)"
    die "could not get the packages of Debian $suite; is the network up, and is there space? (log: $log)"
  fi
  mkdir -p "$target"
  tar -C "$target" --no-same-owner --exclude='./dev/*' --exclude='./usr/share/doc' --exclude='./usr/share/man' \
    --exclude='./usr/share/locale' -xf "$work/root.tar" 2>>"$log" || die "could not unpack the packages (log: $log)"
  rm -f "$work/root.tar"
  local link
  for link in bin sbin lib lib64; do [ -e "$target/$link" ] || ln -s "usr/$link" "$target/$link"; done
}
