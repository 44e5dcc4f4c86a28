"""Labs that stay up: --shell, --console, --keep, --stop."""

import json
import os
import pty
import select
import signal
import stat
import subprocess
import tempfile
import time

from main_job import RUN


class Own:
    """A place for the note of what is kept, so that a user's own kept lab is left alone."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": self.folder.name}
        return self

    def __exit__(self, kind, value, trace):
        if os.path.exists(self.note):
            self.run("--stop")
        self.folder.cleanup()

    @property
    def note(self):
        """The file that --keep and --shell write."""
        return os.path.join(self.folder.name, "distdpu-kept.json")

    def run(self, *arguments):
        """run-vm.sh to its end; its standard output."""
        done = subprocess.run([RUN, *arguments], capture_output=True, text=True, timeout=300, env=self.environment)
        assert done.returncode == 0, done.stderr[-800:]
        return done.stdout

    def kept(self):
        """What is noted."""
        with open(self.note) as f:
            return json.load(f)


def belongs(run_dir):
    """Processes of a lab."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if run_dir.encode() in f.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def expect(terminal, words, seconds=60):
    """Reads from a terminal until `words` came."""
    seen, deadline = b"", time.monotonic() + seconds
    while words not in seen:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], f"{words!r} did not come: {seen[-500:]!r}"
        seen += os.read(terminal, 4096)


def test_a_shell_session_has_consoles_and_ends_on_ctrl_c(ctx):
    """--shell and --console at a terminal: a command in the guest, Ctrl-] leaves, Ctrl-C ends everything."""
    with Own() as own:
        shell = subprocess.Popen([RUN, "--shell", "--guests", "1"], stdout=subprocess.PIPE, text=True,
                                 env=own.environment)
        while "Ctrl-C here ends them" not in (line := shell.stdout.readline()):
            assert line, "the guest did not come up"
        run_dir = own.kept()["run_dir"]
        child, terminal = pty.fork()
        if child == 0:
            os.execve(RUN, [RUN, "--console", "vm0"], own.environment)
        expect(terminal, b"console of vm0")
        os.write(terminal, b"\r")
        expect(terminal, b"# ")
        os.write(terminal, b"echo $(hostname)-$((6 * 7))\r")
        expect(terminal, b"vm0-42")
        os.write(terminal, b"\x1d")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(terminal)
        assert belongs(run_dir), "leaving a console ended the lab"
        shell.send_signal(signal.SIGINT)
        assert shell.wait(60) == 0
        assert not belongs(run_dir) and not os.path.exists(run_dir)
        assert not os.path.exists(own.note)


def test_what_is_kept_stays_until_stop(ctx):
    """--guests 3 --keep: all guests reach the first and stay; --stop leaves no process and no socket."""
    with Own() as own:
        out = own.run("--guests", "3", "--test", "ping", "--keep")
        assert "vm1 → vm0" in out and "vm2 → vm0" in out, out
        run_dir = own.kept()["run_dir"]
        assert len(belongs(run_dir)) == 3 + 1 + 3, "guests, OM, EMs"
        own.run("--stop")
        assert not belongs(run_dir), belongs(run_dir)
        sockets = [name for name in os.listdir(run_dir) if stat.S_ISSOCK(os.lstat(os.path.join(run_dir, name)).st_mode)]
        assert not sockets, sockets
        assert not os.path.exists(own.note)
        again = subprocess.run([RUN, "--stop"], capture_output=True, text=True, timeout=60, env=own.environment)
        assert (again.returncode, again.stderr.strip()) == (
            1, "run-vm.sh: nothing is running that --keep or --shell left")
