#!/usr/bin/env bash
# Runs the fuzz targets of fuzz/, each for some seconds, on the stable toolchain. Needs a C++ compiler (libFuzzer is
# built from its crate).
#   tests/fuzz.sh [SECONDS] [TARGET...]    60 seconds, all targets
# What it finds is kept in fuzz/found/TARGET, an input that fails in fuzz/artifacts/TARGET; run that one alone with
#   tests/fuzz.sh 0 TARGET FILE
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root/fuzz"
seconds=${1:-60}
[ $# -eq 0 ] || shift
command -v c++ >/dev/null || { echo "tests/fuzz.sh: libFuzzer needs a C++ compiler (c++)" >&2; exit 2; }

host=$(rustc -vV | sed -n 's/^host: //p')
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-trace-compares"
coverage+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
# Sanitizers are not stable options; the compiler is the stable one all the same. DISTDPU_FUZZ_ASAN=0 does without.
sanitizer=
if [ "${DISTDPU_FUZZ_ASAN:-1}" = 1 ]; then
  sanitizer="-Zsanitizer=address"
  export RUSTC_BOOTSTRAP=1
fi
export RUSTFLAGS="$coverage $sanitizer -Ccodegen-units=1 --cfg fuzzing"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/fuzz/target}
# The target is named so that the flags are not for build scripts.
cargo build --release --locked --quiet --target "$host"
programs=$CARGO_TARGET_DIR/$host/release

if [ "$seconds" = 0 ]; then
  exec "$programs/$1" "$2"
fi
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(mlx5_device vfio_user_stream vhost_user_messages virtio_net_packed_ring virtio_net_split_ring)
failed=0
for target in "${targets[@]}"; do
  mkdir -p "found/$target" "artifacts/$target"
  begin=$SECONDS
  # An input that takes 20 s, or 2 GiB, is a failure too.
  if "$programs/$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=8192 \
    -artifact_prefix="artifacts/$target/" "found/$target" "corpus/$target" 2>"found/$target.log"; then
    printf 'ok   %s: %s\n' "$target" "$(tail -n 1 "found/$target.log")"
  else
    failed=1
    printf 'FAIL %s after %d s; end of fuzz/found/%s.log:\n' "$target" $((SECONDS - begin)) "$target"
    tail -n 40 "found/$target.log" | sed 's/^/   | /'
  fi
done
exit $failed
