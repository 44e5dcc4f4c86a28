#!/bin/sh
# Runs commands that the host sends over a serial port. Lines from the host:
#   PING NONCE            answered by PONG NONCE
#   RUN ID BASE64         runs the decoded text with sh; several may run at once
# Lines to the host: READY once; OUT ID BASE64 and END ID STATUS for each command.
# A line that is neither is ignored, so noise on the port does no harm.
tty=/dev/${1:?the name of a tty}
# shellcheck disable=SC2094  # a terminal, read and written
exec <"$tty" >"$tty" 2>/dev/null
stty raw -echo -ixon <"$tty"
work=/run/distdpu-agent.d
mkdir -p "$work"
lock=$work/lock

run() { # ID BASE64
  echo "$2" | base64 -d >"$work/$1.sh" 2>/dev/null
  sh "$work/$1.sh" >"$work/$1.out" 2>&1 </dev/null 9>&-
  status=$?
  {
    flock 9
    base64 -w 900 <"$work/$1.out" | sed "s/^/OUT $1 /; s/\$/\r/"
    printf '\nEND %s %s\r\n' "$1" "$status"
  } 9>"$lock"
  rm -f "$work/$1.sh" "$work/$1.out"
}

printf 'READY\r\n'
while read -r word id text; do
  case $word in
    PING) (flock 9; printf '\nPONG %s\r\n' "$id") 9>"$lock" ;;
    RUN) case $id in *[!0-9a-z]* | '') ;; *) run "$id" "$text" & ;; esac ;;
  esac
done
