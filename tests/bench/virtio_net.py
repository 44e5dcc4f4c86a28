"""DPDK's testpmd drives two virtio-net functions of one EM, and in turn two net_vhost ports of another testpmd.

Frames go round: the driver's port 0 → the device → the driver's port 1 → the driver's port 0, and the other way round at the
same time. Driver and device have a processor each. Both devices are vhost-user back ends, with one queue pair, and the driver
is the same program with the same settings. All memory is a memfd; nothing of the host is changed.
"""

import os
import pty
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from lab import host
from lab.dpu import Dpu, Function
from lab.errors import LabError
from lab.report import append_metric, table

PROGRAM, PACKAGE = "dpdk-testpmd", "dpdk-dev"
# Bytes with the check sum, which no virtqueue carries.
SIZES, CHECK = (64, 256, 1518), 4
LAYOUTS = {"split": "packed_vq=0", "packed": "packed_vq=1"}
QUEUE = 256
# Bursts of 32 in each direction: fewer frames than a queue has entries, so that none is dropped for want of room.
BURSTS = 6
SETTLE, SECONDS = 0.3, 1.5
DRIVER_CPU, DEVICE_CPU = 0, 1
PROMPT = b"testpmd> "


def eal(cpu, *devices):
    """Arguments of DPDK: its main thread sleeps, the other one works, both on one processor."""
    return ["--lcores", f"0@{cpu},1@{cpu}", "--no-huge", "-m", "256", "--no-shconf", "--no-pci", "--no-telemetry",
            *(f"--vdev={device}" for device in devices), "--"]


class Stalled(LabError):
    """Nothing went round, or not all of it."""


class Testpmd:
    """One testpmd on a terminal of its own: into a pipe it would say nothing for long."""

    def __init__(self, log, *arguments):
        self.log, (self.terminal, other) = log, pty.openpty()
        argv = [host.tool(PROGRAM, PACKAGE), *arguments]
        self.process = subprocess.Popen(argv, stdin=other, stdout=other, stderr=other, start_new_session=True)
        os.close(other)

    def read(self, marker, seconds=20):
        """What it says up to `marker` and a prompt behind that."""
        text, end = b"", time.monotonic() + seconds
        while not re.search(marker + rb"(?s:.*)" + re.escape(PROMPT), text):
            left = end - time.monotonic()
            if left <= 0 or self.process.poll() is not None:
                break
            if select.select([self.terminal], [], [], left)[0]:
                try:
                    text += os.read(self.terminal, 1 << 16)
                except OSError:
                    break
        else:
            return text.decode(errors="replace")
        with open(self.log, "ab") as f:
            f.write(text)
        raise Stalled(f"{PROGRAM} did not say `{marker.decode()}`", self.log)

    def ask(self, command, marker):
        """The answer to a command."""
        os.write(self.terminal, command.encode() + b"\n")
        return self.read(marker)

    def received(self):
        """Frames that both ports received so far, and when that was."""
        text = self.ask("show port stats all", rb"(?s:NIC statistics.*){2}Tx-bps")
        return sum(int(n) for n in re.findall(r"RX-packets:\s*(\d+)", text)), time.monotonic()

    def stop(self):
        """Ends it; one that does not answer too."""
        try:
            os.write(self.terminal, b"quit\n" if self.process.poll() is None else b"")
            self.process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)


def cpu_seconds(pid):
    """Processor time of a process so far."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(sockets, pid, layout, size, macs, log):
    """Frames a second through a device, and nanoseconds of its processor for each."""
    ports = [f"net_virtio_user{i},path={socket},mac={macs[i]},queues=1,queue_size={QUEUE},{LAYOUTS[layout]}"
             for i, socket in enumerate(sockets)]
    peers = [f"--eth-peer={i},{macs[1 - i]}" for i in range(2)]
    driver = Testpmd(log, *eal(DRIVER_CPU, *ports), "-i", "--forward-mode=io", "--disable-link-check", "--total-num-mbufs=8192",
                     f"--rxd={QUEUE}", f"--txd={QUEUE}", f"--txpkts={size - CHECK}", *peers)
    try:
        driver.read(rb"")
        driver.ask(f"start tx_first {BURSTS}", rb"packet forwarding")
        time.sleep(SETTLE)
        cpu, (first, begin) = cpu_seconds(pid), driver.received()
        time.sleep(SECONDS)
        cpu, (last, end) = cpu_seconds(pid) - cpu, driver.received()
        said = driver.ask("stop", rb"Done\.")
    finally:
        driver.stop()
    dropped = sum(int(n) for n in re.findall(r"[RT]X-dropped:\s*(\d+)", said))
    if dropped or last == first:
        raise Stalled(f"{layout}, {size} B: {last - first} frames went round and {dropped} were dropped", log)
    return (last - first) / (end - begin), cpu / (last - first) * 1e9


class Vhost:
    """DPDK's own back end: a testpmd that forwards between two net_vhost ports."""

    def __init__(self, run_dir):
        self.sockets = [os.path.join(run_dir, f"vhost{i}.sock") for i in range(2)]
        self.log = os.path.join(run_dir, "vhost.log")
        self.process = None

    def __enter__(self):
        ports = [f"net_vhost{i},iface={socket},queues=1" for i, socket in enumerate(self.sockets)]
        self.process = Testpmd(self.log, *eal(DEVICE_CPU, *ports), "-i", "--forward-mode=io", "--disable-link-check",
                               "--total-num-mbufs=8192", "--auto-start")
        self.process.read(rb"packet forwarding")
        return self

    def __exit__(self, *_):
        self.process.stop()


def try_again(once, times=3):
    """What `once` measures. On a busy host a driver may begin before net_vhost is ready, and then nothing goes round."""
    for left in reversed(range(times)):
        try:
            return once()
        except Stalled as e:
            if not left:
                raise
            host.say(f"again: {e}")


def pin(pid, cpu):
    """All threads of a process on one processor."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {cpu})


def run(out, rounds):
    """Prints the table and writes the metrics."""
    if len(os.sched_getaffinity(0)) < 2:
        print("virtio-net: driver and device need a processor each, and there is one", file=sys.stderr)
        return 1
    run_dir = tempfile.mkdtemp(prefix="distdpu-")
    samples = {}
    try:
        host.tool(PROGRAM, PACKAGE)
        if not os.environ.get("DISTDPU_PROFILE"):
            subprocess.run(["cargo", "build", "--release", "--locked", "--quiet", "-p", "em-device", "-p", "om-backend"],
                           cwd=host.ROOT, check=True)
        functions = [Function(i, queue_size=QUEUE, face="vhost-user") for i in range(2)]
        functions[1].em = functions[0].em
        macs = [f.mac for f in functions]
        dpu = Dpu(run_dir, functions)
        try:
            dpu.start()
            pid = dpu.em_pids()[functions[0].em]
            pin(pid, DEVICE_CPU)
            ours = [dpu.socket(f) for f in functions]
            for number in range(rounds):
                for layout in LAYOUTS:
                    for size in SIZES:
                        for side in ("em", "vhost") if number % 2 == 0 else ("vhost", "em"):
                            log = os.path.join(run_dir, "driver.log")

                            def once(side=side, layout=layout, size=size, log=log):
                                if side == "em":
                                    return measure(ours, pid, layout, size, macs, log)
                                with Vhost(run_dir) as vhost:
                                    return measure(vhost.sockets, vhost.process.process.pid, layout, size, macs, log)
                            got = try_again(once)
                            samples.setdefault((layout, size), {}).setdefault(side, []).append(got)
                            host.say(f"round {number + 1}, {layout}, {size} B, {side}: {got[0] / 1e6:.2f} Mpps, "
                                     f"{got[1]:.0f} ns of processor a frame")
        finally:
            dpu.stop()
    except LabError as e:
        print(f"virtio-net: {e}", file=sys.stderr)
        return 1
    shutil.rmtree(run_dir, ignore_errors=True)
    report(out, samples)
    return 0


def report(out, samples):
    """The table and the metrics."""
    rows = []
    for (layout, size), sides in samples.items():
        ours, theirs = ([rate / 1e6 for rate, _ in sides[side]] for side in ("em", "vhost"))
        cpu, their_cpu = ([ns for _, ns in sides[side]] for side in ("em", "vhost"))
        # Pair by pair, so that a slow spell of the machine meets both sides; above 1 the EM is faster.
        ratios = [a / b for a, b in zip(ours, theirs)]
        rows.append([f"{layout}, {size} B", *map(statistics.median, (ours, theirs, ratios)),
                     f"{min(ratios):.2f}–{max(ratios):.2f}", *map(statistics.median, (cpu, their_cpu))])
        append_metric(out, f"{layout}, {size} B", statistics.median(ours), "Mpps", "DPDK net_vhost",
                      statistics.median(ratios), ours)
        append_metric(out, f"{layout}, {size} B, processor a frame", statistics.median(cpu), "ns", "DPDK net_vhost",
                      statistics.median(a / b for a, b in zip(cpu, their_cpu)), cpu)
    print(table(["rings, frame", "EM Mpps", "net_vhost Mpps", "EM faster ×", "spread", "EM ns/frame", "net_vhost ns/frame"],
                rows))
