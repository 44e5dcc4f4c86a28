"""EMs that are killed under the network interface of RDMA functions: a connection goes on."""

import time

from recovery import KILLS, replace
from rdma_ethernet import LAB, clean, devices, interface, perftest  # noqa: F401


def test_em_killed_under_a_stream(ctx):
    """kill -9 of either EM under iperf3 over mlx5e: the stream ends well, the link stays, the kernels are quiet."""
    names = devices(ctx)
    server, client = ctx.lab.vms
    counts = [f"cat /sys/class/net/{interface(vm, name)}/carrier_down_count" for vm, name in zip(ctx.lab.vms, names)]
    before = [vm.must(count) for vm, count in zip(ctx.lab.vms, counts)]
    address, seconds = ctx.lab.rdma_functions[0].ip, 6 + 3 * KILLS
    server.must("pkill -x iperf3; iperf3 -s -D --logfile /tmp/iperf3.log; sleep 0.3")
    client.must(f"(iperf3 -c {address} -t {seconds} >/tmp/iperf.log 2>&1; echo status $? >>/tmp/iperf.log) "
                ">/dev/null 2>&1 & sleep 1", 30)
    for n in range(KILLS):
        time.sleep(1.5 + 0.37 * (n % 3))
        replace(ctx, ctx.lab.rdma_functions[n % 2].em)
    deadline = time.monotonic() + seconds + 60
    while "status" not in client.must("cat /tmp/iperf.log", 30):
        assert time.monotonic() < deadline, "iperf3 does not end"
        time.sleep(1)
    log = client.must("cat /tmp/iperf.log", 30)
    assert "status 0" in log, log[-2000:]
    print("   " + "; ".join(line for line in log.splitlines() if "receiver" in line), flush=True)
    clean(ctx)
    assert [vm.must(count) for vm, count in zip(ctx.lab.vms, counts)] == before


def test_roce_works_afterwards(ctx):
    """New connections over the same functions."""
    perftest(ctx, "ib_write_bw", 65536)
