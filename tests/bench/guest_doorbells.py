"""Two guests' RDMA functions with doorbells that are trapped, and with doorbells that are memory which the EM polls.

The ports are Ethernet, so the driver's network interface rings doorbells too: seldom, it waits for the EM's next look.
A pair of guests has one way or the other from its start on, so each round boots both pairs, one after the other.
"""

import os
import statistics
import time

from lab import host, workloads
from lab.report import append_metric, table
from lab.session import Lab, find_parts

WAYS = (("trapped", False), ("mapped", True))


def cpu_seconds(pid):
    """CPU time of a process."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_share(lab, seconds=5):
    """Per cent of a core that an EM takes with its driver loaded and nothing to do."""
    time.sleep(2)
    pids = lab.dpu.em_pids().values()
    before = sum(map(cpu_seconds, pids))
    time.sleep(seconds)
    return 100 * (sum(map(cpu_seconds, pids)) - before) / seconds / len(pids)


def measure(lab):
    """One round on one pair of guests."""
    server, client = lab.vms
    devices = lab.bring_up_rdma()
    own_ip = lab.rdma_functions[0].ip

    def perftest(name, size, options="", count=None):
        return workloads.perftest(server, client, lab.ip(0), name, size, options, devices, count)

    return {
        "ib_write_lat 2 B, typical µs": perftest("ib_write_lat", 2)["typical_us"],
        "ib_send_bw 64 KiB with events, MiB/s": perftest("ib_send_bw", 65536, "-e", 2000)["mib_per_s"],
        "ib_write_bw 2 B, k messages/s": perftest("ib_write_bw", 2)["msg_per_s"] / 1e3,
        "ib_write_bw 64 KiB, MiB/s": perftest("ib_write_bw", 65536)["mib_per_s"],
        "ib_write_bw 64 KiB, 8 queue pairs, MiB/s": perftest("ib_write_bw", 65536, "-q 8", 1000)["mib_per_s"],
        "TCP over the network interface, Mb/s": workloads.iperf3(server, client, own_ip)["mbit_per_s"],
        "ping, one after the other, µs": workloads.ping(client, own_ip)["avg_us"],
        "ping, five a second, µs": workloads.ping(client, own_ip, 25, flood=False)["avg_us"],
        "idle EM, % of a core": idle_share(lab),
    }


def run(out, rounds):
    """Prints the table and writes the metrics."""
    parts = find_parts()
    values = {name: [] for name, _ in WAYS}
    for number in range(rounds):
        for name, mapped in WAYS:
            host.say(f"round {number + 1} of {rounds}, {name}")
            with Lab(*parts, mtu=9000, rdma="ethernet", mapped_doorbells=mapped) as lab:
                lab.wait_ready()
                values[name].append(measure(lab))
    rows = []
    for what in values["trapped"][0]:
        cells = []
        for name, _ in WAYS:
            all_values = [round_[what] for round_ in values[name]]
            cells.append(f"{statistics.median(all_values):.1f} ({min(all_values):.1f}–{max(all_values):.1f})")
        ratio = statistics.median(b[what] / a[what] if a[what] else 0 for a, b in zip(values["trapped"], values["mapped"]))
        rows.append([what, *cells, f"{ratio:.2f}"])
        append_metric(out, what, statistics.median(v[what] for v in values["mapped"]), what.rpartition(" ")[2],
                      "trapped", ratio, [v[what] for v in values["mapped"]])
    print(table(["", "trapped", "mapped", "ratio"], rows))
    return 0
