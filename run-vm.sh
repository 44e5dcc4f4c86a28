#!/usr/bin/env bash
# Boots guests on a software DPU and runs RDMA between them. `./run-vm.sh --help` lists the options.
# This part brings the host to where the rest can run: packages, a Rust compiler, the programs built.
set -euo pipefail
root=$(cd "$(dirname "$0")" && pwd)
say() { printf '== %s\n' "$*" >&2; }
die() { printf 'run-vm.sh: %s\n' "$*" >&2; exit 1; }

msrv=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
export PATH="$HOME/.cargo/bin:$PATH"

install() { # PACKAGE...
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get to install them: $*"
  [ "$(id -u)" = 0 ] || die "these packages are missing: $*; run once as root, or: sudo apt-get install $*"
  say "installing $*"
  log=$(mktemp /tmp/distdpu-apt.XXXXXX)
  { [ -n "${updated:-}" ] || apt-get update; } >"$log" 2>&1 || die "apt-get update failed (log: $log)"
  updated=1
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >>"$log" 2>&1 \
    || die "apt-get install $* failed (log: $log)"
  rm -f "$log"
}

at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; } # MINIMUM VERSION

rust_version() { cargo --version 2>/dev/null | awk '{print $2}'; }

# A compiler the user has is kept; otherwise the first of the distribution's packages that is new enough.
ensure_rust() {
  local have candidate package
  have=$(rust_version || true)
  if [ -n "$have" ] && at_least "$msrv" "$have"; then return; fi
  if command -v apt-cache >/dev/null; then
    if [ "$(id -u)" = 0 ]; then apt-get update >/dev/null 2>&1 || true; fi
    for package in cargo cargo-web cargo-1.91 cargo-1.89 cargo-1.88 cargo-1.85; do
      candidate=$(apt-cache policy "$package" 2>/dev/null | awk '/Candidate:/{print $2}')
      candidate=${candidate%%[+~-]*}
      if [ -n "$candidate" ] && [ "$candidate" != "(none)" ] && at_least "$msrv" "$candidate"; then
        # A versioned package is not in the search path.
        if [ -x "/usr/lib/rust-${package#cargo-}/bin/cargo" ]; then
          PATH="/usr/lib/rust-${package#cargo-}/bin:$PATH"
          return
        fi
        install "$package" "${package/cargo/rustc}"
        if [ -x "/usr/lib/rust-${package#cargo-}/bin/cargo" ]; then PATH="/usr/lib/rust-${package#cargo-}/bin:$PATH"; fi
        return
      fi
    done
  fi
  die "Rust ${have:-is missing and} ${have:+is too old; }at least $msrv is needed: install it from https://rustup.rs"
}

case " $* " in
  *" --help "*|*" -h "*|*" --stop "*|*" --console "*) ;;
  *)
    missing=()
    command -v python3 >/dev/null || missing+=(python3)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    [ ${#missing[@]} = 0 ] || install "${missing[@]}"
    ensure_rust
    say "building (cargo build --release)"
    (cd "$root" && cargo build --release --locked --quiet -p em-device -p om-backend) \
      || die "the build failed; its messages are above"
    ;;
esac
command -v python3 >/dev/null || die "python3 is missing; install the package python3"
PYTHONPATH="$root/guest-images" PYTHONDONTWRITEBYTECODE=1 exec python3 -m lab "$@"
