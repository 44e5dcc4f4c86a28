"""EMs that are killed under the network interface of RDMA functions: a connection goes on."""

import time

from recovery import KILLS, end_of_stream, replace, start_stream
from rdma_ethernet import LAB, clean, devices, interface, perftest  # noqa: F401


def test_em_killed_under_a_stream(ctx):
    """kill -9 of either EM under iperf3 over mlx5e: the stream ends well, the link stays, the kernels are quiet."""
    names = devices(ctx)
    counts = [f"cat /sys/class/net/{interface(vm, name)}/carrier_down_count" for vm, name in zip(ctx.lab.vms, names)]
    before = [vm.must(count) for vm, count in zip(ctx.lab.vms, counts)]
    seconds = 6 + 3 * KILLS
    start_stream(ctx, seconds, ctx.lab.rdma_functions[0].ip)
    for n in range(KILLS):
        time.sleep(1.5 + 0.37 * (n % 3))
        replace(ctx, ctx.lab.rdma_functions[n % 2].em)
    end_of_stream(ctx, seconds)
    clean(ctx)
    assert [vm.must(count) for vm, count in zip(ctx.lab.vms, counts)] == before


def test_roce_works_afterwards(ctx):
    """New connections over the same functions."""
    perftest(ctx, "ib_write_bw", 65536)
