"""RDMA functions with the face of erdma: every size and kind, rdma_cm, drivers that come and go."""

import re
import time

from erdma import FLAVOUR, LAB, perftest  # noqa: F401
from lab import rdma
from rdma_function import devices, pingpong
from rdma_function_life import RETRY_EXCEEDED
from rdma_recovery import killed_under


def test_bandwidth_of_all_sizes(ctx):
    """ib_write_bw, ib_read_bw and ib_send_bw from 2 bytes to 8 MiB."""
    for name in ("ib_write_bw", "ib_read_bw", "ib_send_bw"):
        for size in (2, 4096, 65536, 1 << 20, 8 << 20):
            perftest(ctx, name, size)


def test_latency_events_and_immediates(ctx):
    """Latency tests with and without events, inline sizes, writes with immediate data, compare and swap."""
    for name, size, options in (("ib_write_lat", 2, ""), ("ib_write_lat", 96, ""), ("ib_write_lat", 4096, ""),
                                ("ib_read_lat", 65536, "-e"), ("ib_send_lat", 2, "-e"), ("ib_send_lat", 65536, ""),
                                ("ib_atomic_bw", 8, "-A CMP_AND_SWAP"), ("ib_atomic_lat", 8, "-e"),
                                ("ib_write_bw", 65536, "--write_with_imm"), ("ib_send_bw", 65536, "-e")):
        perftest(ctx, name, size, options)


def test_several_queue_pairs_and_both_directions(ctx):
    """-q 4, -b, and both."""
    for options in ("-q 4", "-b", "-q 4 -b"):
        perftest(ctx, "ib_write_bw", 65536, options)
    perftest(ctx, "ib_send_bw", 65536, "-q 4 -e")


def test_connections_by_rdma_cm(ctx):
    """perftest -R: addresses, routes and connections by the kernel's connection manager."""
    for name, size, options in (("ib_write_bw", 65536, "-R"), ("ib_read_bw", 65536, "-R"), ("ib_send_bw", 4096, "-R -e"),
                                ("ib_atomic_bw", 8, "-R"), ("ib_write_lat", 2, "-R"), ("ib_write_bw", 1 << 20, "-R -q 4")):
        perftest(ctx, name, size, options)


def test_pingpong_checks_its_data(ctx):
    """ibv_rc_pingpong, polling and by events."""
    for options in ("-g 1 -c", "-g 1 -c -e", "-g 1 -c -s 65536", "-g 0 -c"):
        pingpong(ctx, "ibv_rc_pingpong", options)


def test_driver_unloads_and_loads(ctx):
    """rmmod and modprobe, five times; then a transfer."""
    vm, f = ctx.lab.vms[0], ctx.lab.rdma_functions[0]
    devices(ctx)
    for _ in range(5):
        vm.must("rmmod erdma", 30)
        assert not rdma.devices(vm, "erdma")
        rdma.bring_up(vm, f)
    perftest(ctx, "ib_write_bw", 65536)


def test_guest_reboots(ctx):
    """system_reset of the server's guest; afterwards all works, and the EMs are the same."""
    devices(ctx)
    pids = ctx.lab.dpu.em_pids()
    ctx.lab.vms[0].qmp("system_reset")
    ctx.lab.vms[0].wait_ready(90)
    perftest(ctx, "ib_write_bw", 65536)
    assert ctx.lab.dpu.em_pids() == pids


def test_em_killed_under_traffic(ctx):
    """kill -9 of either EM under writes and sends, again and again: status 0 and quiet kernels; then all works."""
    killed_under(ctx, "ib_write_bw", "-s 65536")
    killed_under(ctx, "ib_send_bw", "-s 4096")
    perftest(ctx, "ib_read_bw", 65536)


def test_guest_killed_under_traffic(ctx):
    """kill -9 of the server's QEMU: the peer's writes end with an error, and a new guest takes the function."""
    own, other = devices(ctx)
    server, client = ctx.lab.vms
    options = "-F -s 65536 -D 90"
    server.must(f"(ib_write_bw -d {own} {options} >/tmp/server.log 2>&1 &); sleep 0.5")
    ident = client.guest.spawn(f"ib_write_bw -d {other} {options} {ctx.lab.ip(0)} 2>&1")
    time.sleep(5)
    status, text = client.guest.wait(ident, 1)
    assert status == 124, (status, text[-600:])
    server.kill()
    status, text = client.guest.wait(ident, 60)
    found = re.search(r"Failed status (\d+)", text)
    assert status not in (0, 124) and found and int(found[1]) == RETRY_EXCEEDED, (status, text[-600:])
    ctx.lab.replace_vm(0).start().wait_ready(90)
    perftest(ctx, "ib_write_bw", 65536)
