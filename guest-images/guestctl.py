#!/usr/bin/env python3
"""Runs commands in a guest over its control port (see agent.sh for the protocol).

  guestctl.py --socket PATH wait-ready [--timeout S]
  guestctl.py --socket PATH run [--timeout S] 'COMMAND'

`run` prints what the command prints as it comes and ends with the command's status: 124 when the time is up (the
command is ended in the guest), 125 when the guest does not answer or is gone.
"""

import argparse
import base64
import binascii
import secrets
import select
import socket
import sys
import time

TIMED_OUT = 124
UNREACHABLE = 125
# Pieces of a script and of a write that an emulated serial port takes without loss.
PIECE, BURST = 6000, 1024
# A line longer than this is noise.
LONGEST_LINE = 1 << 20


class GuestError(Exception):
    """The guest did not answer; the text says what was waited for."""


class Port:
    """One connection to the control port, as lines. QEMU serves one connection at a time; others wait for it."""

    def __init__(self, path, deadline, patience):
        """Connects; for `patience` seconds a port that is not there (yet) is no error."""
        self.path, self.deadline, self.rest = path, deadline, b""
        give_up = min(deadline, time.monotonic() + patience)
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(path)
                self.socket.setblocking(False)
                return
            except OSError as e:
                self.socket.close()
                if time.monotonic() >= give_up:
                    raise GuestError(f"the guest is gone or not started: nothing answers at {path} ({e.strerror})")
                time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def _gone(self):
        return GuestError(f"the guest is gone: QEMU closed the control port {self.path}")

    def send(self, *words):
        """One line. The line break before it ends whatever noise the guest has read so far."""
        data = ("\n" + " ".join(words) + "\n").encode()
        deadline = max(self.deadline, time.monotonic() + 1)
        while data:
            _, ready, _ = select.select([], [self.socket], [], 0.2)
            try:
                if ready:
                    data = data[self.socket.send(data[:BURST]):]
                elif time.monotonic() > deadline:
                    raise GuestError("the guest does not read its control port; has it hung?")
            except BlockingIOError:
                pass
            except OSError:
                raise self._gone() from None

    def lines(self, until=None):
        """Words of the lines as they come, until the time is up (`until`: a time before the deadline)."""
        end = self.deadline if until is None else min(until, self.deadline)
        while True:
            while b"\n" in self.rest:
                line, self.rest = self.rest.split(b"\n", 1)
                yield line.decode("ascii", "replace").split()
            if len(self.rest) > LONGEST_LINE:
                self.rest = b""
            left = end - time.monotonic()
            if left <= 0:
                return
            if select.select([self.socket], [], [], left)[0]:
                try:
                    data = self.socket.recv(65536)
                except BlockingIOError:
                    continue
                except OSError:
                    raise self._gone() from None
                if not data:
                    raise self._gone()
                self.rest += data

    def answered(self, answer, until=None):
        """Whether this line came in time."""
        return any(words == answer for words in self.lines(until))

    def finish(self, *words, grace=5):
        """A last line, and proof that the guest has read it: QEMU loses what is on its way when a connection ends."""
        nonce = secrets.token_hex(6)
        self.deadline = max(self.deadline, time.monotonic() + grace)
        self.send(*words)
        self.send("PING", nonce)
        if not self.answered(["PONG", nonce], time.monotonic() + grace):
            raise GuestError(f"no answer from the guest in {grace:.0f} s")

    def result(self, ident, write):
        """Status of a command whose output goes to `write` as bytes; None when the time is up."""
        for words in self.lines():
            if words == ["LOST", ident]:
                raise GuestError("the guest knows no such command; has it been restarted?")
            if len(words) != 3 or words[1] != ident:
                continue
            if words[0] == "OUT":
                try:
                    write(base64.b64decode(words[2], validate=True))
                except binascii.Error:
                    pass  # noise that looks like output
            elif words[0] == "END" and words[2].isdigit():
                return int(words[2])
        return None


class Guest:
    """A guest's control port: the unix socket of QEMU's chardev.

    Each call connects anew, so that a call may come before or after a restart of the guest. QEMU serves one
    connection at a time: a call made during another one (of any process) waits for that, within its own timeout.
    Commands that shall run side by side are started with `spawn`. Timeouts are in seconds.
    """

    def __init__(self, path):
        self.path = path

    def _connect(self, timeout, patience=1.0):
        return Port(self.path, time.monotonic() + timeout, patience)

    def wait_ready(self, timeout=60):
        """Returns when the agent answers; also waits for QEMU to make the socket."""
        nonce = secrets.token_hex(6)
        with self._connect(timeout, timeout) as port:
            while time.monotonic() < port.deadline:
                port.send("PING", nonce)
                if port.answered(["PONG", nonce], time.monotonic() + 1):
                    return
        raise GuestError(f"no answer from the guest in {timeout:.0f} s")

    @staticmethod
    def _submit(port, verb, command):
        """Sends a script, a long one in pieces that the guest acknowledges; its id."""
        ident, data = secrets.token_hex(6), command.encode()
        pieces = [base64.b64encode(data[i:i + PIECE]).decode() for i in range(0, len(data), PIECE)] or [""]
        for piece in pieces[:-1]:
            port.send("ADD", ident, piece)
            if not port.answered(["GOT", ident]):
                raise GuestError("the guest did not take the command in time")
        port.send(verb, ident, pieces[-1])
        return ident

    def run(self, command, timeout=60, write=None):
        """`(status, output)` of a shell script. When the time is up it is ended and the status is 124.

        With `write` the output goes there as bytes while the command runs, and the output returned is empty.
        """
        output = bytearray()
        with self._connect(timeout) as port:
            ident = self._submit(port, "RUN", command)
            try:
                status = port.result(ident, write or output.extend)
            except KeyboardInterrupt:
                port.finish("KILL", ident)
                raise
            if status is None:
                status = TIMED_OUT
                try:
                    port.finish("KILL", ident)
                except GuestError:
                    pass  # a guest that hangs: the time is up all the same
        return status, output.decode(errors="replace")

    def spawn(self, command, timeout=10):
        """Starts a shell script in the guest and returns its id, for `wait` and `kill`."""
        with self._connect(timeout) as port:
            ident = self._submit(port, "SPAWN", command)
            if not port.answered(["STARTED", ident]):
                raise GuestError(f"the guest did not start the command in {timeout:.0f} s")
            return ident

    def wait(self, ident, timeout=60, write=None):
        """`(status, output)` of a spawned command, as `run`; with status 124 it runs on and may be waited for again.

        The id is used up when the command has ended.
        """
        output, tag = bytearray(), secrets.token_hex(6)
        with self._connect(timeout) as port:
            port.send("WAIT", ident, tag)
            status = port.result(tag, write or output.extend)
            port.finish("LEAVE" if status is None else "DROP", ident)
        return TIMED_OUT if status is None else status, output.decode(errors="replace")

    def kill(self, ident, timeout=10):
        """Ends a spawned command and what it started; `wait` then gives its status."""
        with self._connect(timeout) as port:
            port.finish("KILL", ident, grace=timeout)


def print_now(data):
    """Output of a command, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True, help="unix socket of the chardev behind the guest's control port")
    parser.add_argument("action", choices=("run", "wait-ready"))
    parser.add_argument("command", nargs="?", help="shell script for `run`")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, 60 by default")
    args = parser.parse_intermixed_args()
    if (args.action == "run") != (args.command is not None):
        parser.error("`run` needs one command, `wait-ready` none")
    guest = Guest(args.socket)
    try:
        if args.action == "run":
            return guest.run(args.command, args.timeout, print_now)[0]
        guest.wait_ready(args.timeout)
        return 0
    except GuestError as e:
        print(f"guestctl.py: {e}", file=sys.stderr)
        return UNREACHABLE
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
