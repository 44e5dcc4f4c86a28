"""Two guests: `ib_write_bw` over the RDMA function, over soft RoCE, and one host thread's memcpy.

All three copy one buffer of the size to another, again and again. They are measured in turn, round by round, so
that drift of the machine meets all; the guests are idle while the host's thread copies.
"""

import statistics
import subprocess
import sys

from lab import host, workloads
from lab.errors import LabError
from lab.report import append_metric, table
from lab.session import Lab, find_parts

# Bytes of a message; messages over the function, over soft RoCE; the least ratio to memcpy.
SIZES = ((65536, 40000, 200, 0.6), (1 << 20, 5000, 20, 0.8))
# The least ratio to soft RoCE.
SOFT_BAR = 100


def memcpy(size):
    """MiB/s of one thread's memcpy on this host."""
    done = subprocess.run([host.program("examples/memcpy"), str(size)], capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"the memcpy helper failed: {done.stderr.strip()}")
    return float(done.stdout)


def measure(lab, devices, size, count, soft_count, number):
    """One round: MiB/s by side, memcpy before or after the guests' in turn."""
    server, client = lab.vms
    sides = [
        ("memcpy", lambda: memcpy(size)),
        ("function", lambda: workloads.perftest(server, client, lab.ip(0), "ib_write_bw", size, device=devices,
                                                count=count)["mib_per_s"]),
        ("soft", lambda: workloads.perftest(server, client, lab.ip(0), "ib_write_bw", size,
                                            count=soft_count)["mib_per_s"]),
    ]
    turn = number % len(sides)
    return {side: run() for side, run in sides[turn:] + sides[:turn]}


def run(out, rounds):
    """Prints the table and writes the metrics."""
    for what in (["-p", "em-device", "-p", "om-backend"], ["-p", "distdpu-tests", "--example", "memcpy"]):
        subprocess.run(["cargo", "build", "--release", "--locked", "--quiet", *what], cwd=host.ROOT, check=True)
    samples = {size: [] for size, *_ in SIZES}
    try:
        with Lab(*find_parts(), accel=host.pick_accel("auto")[0], mtu=9000, rdma="ethernet") as lab:
            lab.wait_ready()
            devices = lab.bring_up_rdma()
            for number in range(rounds):
                for size, count, soft_count, _ in SIZES:
                    samples[size].append(measure(lab, devices, size, count, soft_count, number))
                    host.say(f"round {number + 1}, {size >> 10} KiB: {samples[size][-1]}")
    except LabError as e:
        print(f"guest-rdma: {e}", file=sys.stderr)
        return 1
    rows = []
    for size, _, _, bar in SIZES:
        sides = {side: [s[side] for s in samples[size]] for side in ("function", "memcpy", "soft")}
        name = f"ib_write_bw, {size >> 10} KiB"
        for side, against, least in (("memcpy", "memcpy, one host thread", bar), ("soft", "soft RoCE", SOFT_BAR)):
            # Round by round, so that a slow spell of the machine meets both sides.
            ratios = [ours / theirs for ours, theirs in zip(sides["function"], sides[side])]
            ratio = statistics.median(ratios)
            rows.append([name, statistics.median(sides["function"]), against, statistics.median(sides[side]), ratio,
                         f"{min(ratios):.2f}–{max(ratios):.2f}", least, "met" if ratio >= least else "missed"])
            append_metric(out, name, statistics.median(sides["function"]), "MiB/s", against, ratio, sides["function"])
    print(table(["figure", "MiB/s", "compared with", "MiB/s", "ratio", "spread", "bar", ""], rows))
    return 0
