"""Two guests, three figures, two networks: the DPU's function and QEMU's own virtio-net on TAP and bridge.

Both pairs of guests run the same kernel and image with the same settings. They are up at the same time and
measured in turn, so that drift of the machine meets both; the pair that rests is stopped by QMP.
"""

import os
import statistics
import subprocess
import sys

from lab import host, workloads
from lab.errors import LabError
from lab.report import append_metric, table
from lab.session import Lab, find_parts
from lab.vm import Vm, tap_nic

BRIDGE = "ddbench0"


def ip(*words):
    """One `ip` command."""
    subprocess.run([host.tool("ip", "iproute2"), *words], check=True)


class Bridge:
    """A bridge with two TAPs, gone at the end."""

    def __init__(self, mtu):
        self.mtu, self.taps = mtu, [f"{BRIDGE}t{i}" for i in range(2)]

    def __enter__(self):
        self.__exit__(None, None, None)
        ip("link", "add", BRIDGE, "type", "bridge")
        for tap in self.taps:
            ip("tuntap", "add", tap, "mode", "tap", "vnet_hdr")
            ip("link", "set", tap, "mtu", str(self.mtu), "master", BRIDGE, "up")
        ip("link", "set", BRIDGE, "mtu", str(self.mtu), "up")
        return self

    def __exit__(self, *_):
        for link in (*self.taps, BRIDGE):
            subprocess.run([host.tool("ip", "iproute2"), "link", "del", link], stderr=subprocess.DEVNULL)


def measure(vms, address):
    """One round on one pair of guests."""
    server, client = vms
    return {
        "tcp, Mb/s": workloads.iperf3(server, client, address, 3)["mbit_per_s"],
        "tcp reverse, Mb/s": workloads.iperf3(server, client, address, 3, "-R")["mbit_per_s"],
        "ping average, µs": workloads.ping(client, address, 1000)["avg_us"],
    }


def run(out, rounds):
    """Prints the table and writes the metrics."""
    if os.geteuid() != 0:
        print("guest-net: the TAP bridge it compares with needs root", file=sys.stderr)
        return 1
    subprocess.run(["cargo", "build", "--release", "--locked", "--quiet", "-p", "em-device", "-p", "om-backend"],
                   cwd=host.ROOT, check=True)
    qemu, boot = find_parts()
    accel, _ = host.pick_accel("auto")
    rows = []
    for mtu in (1500, 9000):
        with Bridge(mtu) as bridge, Lab(qemu, boot, 2, accel, mtu=mtu, rxe=False) as lab:
            peers = [Vm(f"tap{i}", lab.run_dir, boot=boot, nics=[tap_nic(tap, f"02:00:00:01:00:{i + 1:02x}")],
                        command_line=f"dpu.ip=10.0.9.{i + 1}/24 dpu.mtu={mtu}", **lab.settings)
                     for i, tap in enumerate(bridge.taps)]
            try:
                for vm in peers:
                    vm.start()
                for vm in (*peers, *lab.vms):
                    vm.wait_ready()
                sides = {"dpu": (lab.vms, lab.ip(0)), "tap": (peers, "10.0.9.1")}
                samples = {side: [] for side in sides}
                for vm in peers:
                    vm.qmp("stop")
                for number in range(rounds):
                    for side in ("dpu", "tap") if number % 2 == 0 else ("tap", "dpu"):
                        vms, address = sides[side]
                        for vm in vms:
                            vm.qmp("cont")
                        for vm in sides["tap" if side == "dpu" else "dpu"][0]:
                            vm.qmp("stop")
                        samples[side].append(measure(vms, address))
                        host.say(f"MTU {mtu}, round {number + 1}, {side}: {samples[side][-1]}")
            except LabError as e:
                print(f"guest-net: {e}", file=sys.stderr)
                return 1
            finally:
                for vm in peers:
                    vm.stop()
        for metric in samples["dpu"][0]:
            ours, theirs = ([s[metric] for s in samples[side]] for side in ("dpu", "tap"))
            # Pair by pair, so that a slow spell of the machine meets both sides; above 1 the DPU is better.
            better = [b / a if "ping" in metric else a / b for a, b in zip(ours, theirs)]
            rows.append([f"{metric}, MTU {mtu}", statistics.median(ours), f"{min(ours):.0f}–{max(ours):.0f}",
                         statistics.median(theirs), f"{min(theirs):.0f}–{max(theirs):.0f}",
                         statistics.median(better), f"{min(better):.2f}–{max(better):.2f}"])
            name, unit = metric.split(", ")
            append_metric(out, f"{name}, MTU {mtu}", statistics.median(ours), unit, "QEMU virtio-net, TAP, bridge",
                          statistics.median(better), ours)
    print(table(["figure", "DPU", "spread", "TAP", "spread", "DPU better ×", "spread"], rows))
    return 0
