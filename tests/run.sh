#!/usr/bin/env bash
# All tests of the project, in the order in which they fail fastest. One line per stage, a log each.
#   tests/run.sh            everything
#   tests/run.sh STAGE...   only these: style deny unit system guest vm
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
logs=${DISTDPU_TEST_LOGS:-$root/target/test-logs}
mkdir -p "$logs"
passed=0 failed=0

stage() { # NAME COMMAND...
  local name=$1 begin=$SECONDS status=0
  shift
  printf '== %s: %s\n' "$name" "$*"
  "$@" >"$logs/$name.log" 2>&1 || status=$?
  grep -E '^(test result:|[0-9]+ passed, [0-9]+ failed)|^(ok|FAIL|not ok) ' "$logs/$name.log" | sed 's/^/   /' || true
  if [ "$status" = 0 ]; then
    passed=$((passed + 1))
    printf '   %s passed in %d s\n' "$name" $((SECONDS - begin))
  else
    failed=$((failed + 1))
    printf '   %s FAILED with status %d after %d s; end of %s:\n' "$name" "$status" $((SECONDS - begin)) "$logs/$name.log"
    tail -n 60 "$logs/$name.log" | sed 's/^/   | /'
  fi
}

style() {
  cargo fmt --all --check && cargo clippy --workspace --all-targets --locked --quiet -- -D warnings || return 1
  # A workspace of its own, which nothing else here builds.
  cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null || return 1
  python3 -m compileall -q guest-images tests/vm tests/bench || return 1
  find guest-images tests -name __pycache__ -prune -exec rm -rf {} +
  # shellcheck disable=SC2046
  shellcheck -x -P SCRIPTDIR $(git ls-files '*.sh' .ci/run guest-images/init)
}
deny() {
  cargo deny --all-features check licenses bans sources || return 1
  # The advisory database lives on the network: out of reach is said, an advisory found is a failure.
  if cargo deny fetch db; then
    cargo deny --all-features check --disable-fetch advisories
  else
    echo "ok licences, bans and sources; advisories NOT checked: their database is out of reach"
  fi
}
unit() { cargo test --workspace --exclude distdpu-tests --locked; }
system() { cargo build --locked -p em-device -p om-backend && cargo test -p distdpu-tests --locked; }
guest() { guest-images/test.sh; }
vm() { cargo build --release --locked --quiet -p em-device -p om-backend && PYTHONDONTWRITEBYTECODE=1 python3 tests/vm/run.py; }

stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(style deny unit system guest vm)
for name in "${stages[@]}"; do
  case $name in
    style | deny | unit | system | guest | vm) stage "$name" "$name" ;;
    *) echo "tests/run.sh: there is no stage \`$name\`; there are style, deny, unit, system, guest, vm" >&2; exit 2 ;;
  esac
done
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
