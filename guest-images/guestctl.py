#!/usr/bin/env python3
"""Runs commands in a guest over its control port (see agent.sh for the protocol).

  guestctl.py --socket PATH wait-ready [--timeout S]
  guestctl.py --socket PATH run [--timeout S] 'COMMAND'

`run` prints the command's output and ends with its status; 124 when the time is up.
"""

import argparse
import base64
import secrets
import select
import socket
import sys
import time


class GuestError(Exception):
    """The guest did not answer; the text says what was waited for."""


class Guest:
    """A guest's control port: the unix socket of QEMU's chardev. One caller at a time."""

    def __init__(self, path):
        self.path = path

    def _open(self, deadline):
        while True:
            s = socket.socket(socket.AF_UNIX)
            try:
                s.connect(self.path)
                s.setblocking(False)
                return s
            except OSError as e:
                s.close()
                if time.monotonic() > deadline:
                    raise GuestError(f"the control port {self.path} does not open: {e.strerror}")
                time.sleep(0.05)

    @staticmethod
    def _lines(s, deadline, again=None):
        """Lines as they come; sends `again` once a second until the first useful one. None at the deadline."""
        rest, resend = b"", time.monotonic() + 1
        while time.monotonic() < deadline:
            ready, _, _ = select.select([s], [], [], min(0.2, max(0.01, deadline - time.monotonic())))
            if ready:
                data = s.recv(65536)
                if not data:
                    raise GuestError("the guest is gone: its control port was closed")
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.strip().decode(errors="replace") for line in lines)
            elif again and time.monotonic() > resend:
                Guest._send(s, again, deadline)
                resend = time.monotonic() + 1
        yield None

    @staticmethod
    def _send(s, data, deadline):
        """Sends all, in pieces that an emulated serial port takes without loss."""
        while data:
            _, ready, _ = select.select([], [s], [], 0.2)
            if ready:
                data = data[s.send(data[:1024]):]
            elif time.monotonic() > deadline:
                raise GuestError("the guest does not read its control port")

    def wait_ready(self, timeout=60):
        """Returns when the agent answers."""
        deadline, nonce = time.monotonic() + timeout, secrets.token_hex(6)
        ping = f"\nPING {nonce}\n".encode()
        with self._open(deadline) as s:
            self._send(s, ping, deadline)
            for line in self._lines(s, deadline, again=ping):
                if line is None:
                    raise GuestError(f"no answer from the guest in {timeout:.0f} s")
                if line == f"PONG {nonce}":
                    return

    def run(self, command, timeout=60):
        """`(status, output)` of a shell command; status 124 when the time is up (it may go on in the guest)."""
        deadline, ident, output = time.monotonic() + timeout, secrets.token_hex(4), []
        text = base64.b64encode(command.encode()).decode()
        with self._open(deadline) as s:
            self._send(s, f"\nRUN {ident} {text}\n".encode(), deadline)
            for line in self._lines(s, deadline):
                if line is None:
                    return 124, "".join(output)
                words = line.split(" ")
                if words[:2] == ["OUT", ident] and len(words) == 3:
                    output.append(words[2])
                elif words[:2] == ["END", ident] and len(words) == 3 and words[2].isdigit():
                    return int(words[2]), base64.b64decode("".join(output)).decode(errors="replace")
        return 124, ""


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("action", choices=("run", "wait-ready"))
    parser.add_argument("command", nargs="?")
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_intermixed_args()
    guest = Guest(args.socket)
    try:
        if args.action == "wait-ready":
            guest.wait_ready(args.timeout)
            return 0
        if not args.command:
            parser.error("run needs a command")
        status, output = guest.run(args.command, args.timeout)
        sys.stdout.write(output)
        return status
    except GuestError as e:
        print(f"guestctl.py: {e}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
