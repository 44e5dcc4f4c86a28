"""Two pairs of guests on one DPU: `ib_write_bw` over functions with the face of erdma and over those of mlx5.

All four guests run the same kernel. They are measured in turn, round by round, so that drift of the machine meets
both; the pair that is not measured is idle.
"""

import statistics
import subprocess
import sys

from lab import host, workloads
from lab.errors import LabError
from lab.report import append_metric, table
from lab.session import Lab, find_parts

# Bytes of a message; messages; the least ratio to mlx5, or None.
SIZES = ((65536, 60000, None), (1 << 20, 20000, 0.9))


def measure(lab, devices, size, count, number):
    """One round: MiB/s by face."""
    sides = [(face, lambda first=first: workloads.perftest(
        *lab.vms[first:first + 2], lab.ip(first), "ib_write_bw", size, device=devices[first:first + 2],
        count=count)["mib_per_s"]) for face, first in (("mlx5", 0), ("erdma", 2))]
    return {face: run() for face, run in (sides if number % 2 == 0 else sides[::-1])}


def run(out, rounds):
    """Prints the table and writes the metrics."""
    subprocess.run(["cargo", "build", "--release", "--locked", "--quiet", "-p", "em-device", "-p", "om-backend"],
                   cwd=host.ROOT, check=True)
    samples = {size: [] for size, *_ in SIZES}
    kinds = ["ethernet"] * 2 + ["erdma"] * 2
    try:
        with Lab(*find_parts(flavour="erdma"), guests=4, accel=host.pick_accel("auto")[0], mtu=9000, rdma=kinds,
                 rxe=False) as lab:
            lab.wait_ready()
            devices = lab.bring_up_rdma()
            for number in range(rounds):
                for size, count, _ in SIZES:
                    samples[size].append(measure(lab, devices, size, count, number))
                    host.say(f"round {number + 1}, {size >> 10} KiB: {samples[size][-1]}")
    except LabError as e:
        print(f"guest-erdma: {e}", file=sys.stderr)
        return 1
    rows = []
    for size, _, least in SIZES:
        sides = {face: [s[face] for s in samples[size]] for face in ("erdma", "mlx5")}
        # Round by round, so that a slow spell of the machine meets both sides.
        ratios = [ours / theirs for ours, theirs in zip(sides["erdma"], sides["mlx5"])]
        ratio, name = statistics.median(ratios), f"ib_write_bw, {size >> 10} KiB, erdma"
        judged = ["", ""] if least is None else [least, "met" if ratio >= least else "missed"]
        rows.append([name, statistics.median(sides["erdma"]), "mlx5", statistics.median(sides["mlx5"]), ratio,
                     f"{min(ratios):.2f}–{max(ratios):.2f}", *judged])
        append_metric(out, name, statistics.median(sides["erdma"]), "MiB/s", "mlx5", ratio, sides["erdma"])
    print(table(["figure", "MiB/s", "compared with", "MiB/s", "ratio", "spread", "bar", ""], rows))
    return 0
