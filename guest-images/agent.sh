#!/bin/sh
# Runs commands that the host sends over a serial port. Lines from the host:
#   PING NONCE         answered by PONG NONCE
#   ADD ID BASE64      a piece of a long script, answered by GOT ID; the last piece comes with RUN or SPAWN
#   RUN ID BASE64      runs the script with sh; OUT lines as it prints, then END; several may run at once
#   SPAWN ID BASE64    starts the script, answered by STARTED ID; what it prints is kept for WAIT
#   WAIT ID TAG        OUT lines from the beginning, as they come, then END, all with TAG in place of ID; takes the
#                      place of an earlier WAIT; LOST TAG if there is no such command
#   LEAVE ID           ends a WAIT
#   DROP ID            forgets a command that has ended
#   KILL ID            ends the command and what it started
# Lines to the host: READY once; OUT ID BASE64, each line decodable by itself; END ID STATUS.
# A line that is none of these is ignored, so noise on the port does no harm.
tty=/dev/${1:?the name of a tty}
# shellcheck disable=SC2094  # a terminal, read and written
exec <"$tty" >"$tty" 2>/dev/null
stty raw -echo -ixon clocal
work=/run/distdpu-agent.d
mkdir -p "$work"
lock=$work/lock

say() { (flock 9; printf '\n%s\r\n' "$*") 9>"$lock"; }

# What came into the output file since fd 3 was read last. The caller holds the lock.
rest() { base64 -w 900 <&3 | sed "s/^/OUT $1 /; s/\$/\r/"; }

# Sends what a command prints, once every so many seconds, until it has a status or TAG is not the one to serve.
# A look at the file's time costs nothing; programs start only when there is something to send.
follow() { # ID TAG SECONDS
  while [ ! -e "$work/$1.status" ]; do
    sleep "$3"
    read -r turn <"$work/$1.turn" && [ "$turn" = "$2" ] || return 1
    # shellcheck disable=SC3013  # dash, bash and busybox have -nt
    [ ! -e "$work/$1.$2" ] || [ "$work/$1.out" -nt "$work/$1.$2" ] || continue
    : >"$work/$1.$2"
    (flock 9; rest "$2"; echo) 9>"$lock"
  done
}

start() { # ID: a session of its own, so that KILL reaches all of it; sets `job`
  : >"$work/$1.out"
  setsid sh "$work/$1.sh" >"$work/$1.out" 2>&1 </dev/null &
  job=$!
  echo "$job" >"$work/$1.pid"
}

run() { # ID
  start "$1"
  exec 3<"$work/$1.out"
  echo "$1" >"$work/$1.turn"
  follow "$1" "$1" 1 &
  follower=$!
  wait "$job"
  status=$?
  # With the lock held the follower is not in the middle of a line.
  (flock 9; kill "$follower"; rest "$1"; printf '\nEND %s %s\r\n' "$1" "$status") 9>"$lock"
  forget "$1"
}

spawn() { # ID
  start "$1"
  say STARTED "$1"
  wait "$job"
  echo $? >"$work/$1.status.new"
  mv "$work/$1.status.new" "$work/$1.status"
}

attend() { # ID TAG
  [ -e "$work/$1.out" ] || { say LOST "$2"; return; }
  exec 3<"$work/$1.out"
  echo "$2" >"$work/$1.turn"
  follow "$1" "$2" 0.3 || return
  read -r status <"$work/$1.status"
  (flock 9; rest "$2"; printf '\nEND %s %s\r\n' "$2" "$status") 9>"$lock"
}

stop() { # ID
  pid=$(cat "$work/$1.pid") || return
  kill -s TERM -- "-$pid" || kill "$pid"
  sleep 1
  kill -s KILL -- "-$pid"
}

forget() { rm -f "$work/$1".*; }

printf '\nREADY\r\n'
while read -r word id text; do
  case $word in
    PING) say PONG "$id"; continue ;;
    ADD | RUN | SPAWN | WAIT | LEAVE | DROP | KILL) ;;
    *) continue ;;
  esac
  case $id in *[!0-9a-z]* | '') continue ;; esac
  case $word in ADD | RUN | SPAWN) echo "$text" | base64 -d >>"$work/$id.sh" || { forget "$id"; continue; } ;; esac
  case $word in
    ADD) say GOT "$id" ;;
    RUN) run "$id" & ;;
    SPAWN) spawn "$id" & ;;
    WAIT) case $text in *[!0-9a-z]* | '') ;; *) attend "$id" "$text" & ;; esac ;;
    LEAVE) [ ! -e "$work/$id.turn" ] || echo >"$work/$id.turn" ;;
    DROP) [ ! -e "$work/$id.status" ] || forget "$id" ;;
    KILL) stop "$id" & ;;
  esac
done
