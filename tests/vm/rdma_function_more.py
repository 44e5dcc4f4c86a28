"""More of the RDMA function: latency, atomics, events, many queue pairs, all services, checked data."""

import time

from lab import workloads
from rdma_function import LAB, LAT_TESTS, RC_TESTS, clean, devices, perftest, pingpong  # noqa: F401


def test_latency(ctx):
    """ib_write_lat, ib_read_lat and ib_send_lat of small, page-sized and large messages."""
    for name in LAT_TESTS:
        for size in (2, 4096, 65536):
            perftest(ctx, name, size)


def test_atomics(ctx):
    """Compare-and-swap and fetch-and-add, bandwidth and latency."""
    for name in ("ib_atomic_bw", "ib_atomic_lat"):
        for kind in ("CMP_AND_SWAP", "FETCH_AND_ADD"):
            perftest(ctx, name, 8, f"-A {kind}")


def test_completion_events(ctx):
    """`-e`: the CPU sleeps until the MSI-X of a completion (perftest has that for reads and sends)."""
    for name in ("ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"):
        for options in ("-e", "-e -q 8") if name.endswith("bw") else ("-e",):
            perftest(ctx, name, 65536, options)


def test_many_queue_pairs_and_both_directions(ctx):
    """`-q 8`, `-b`, and both."""
    for options in ("-q 8", "-b", "-q 8 -b"):
        for name in RC_TESTS:
            perftest(ctx, name, 65536, options)


def test_inline_and_unsignalled(ctx):
    """`--inline_size` up to what the device says it can, and many requests with one completion."""
    for size in (2, 64):
        for name in ("ib_write_lat", "ib_send_lat", "ib_write_bw", "ib_send_bw"):
            perftest(ctx, name, size, f"--inline_size={size}")
    for moderation in (1, 64):
        perftest(ctx, "ib_write_bw", 4096, f"-Q {moderation}")


def test_unreliable_transports(ctx):
    """UC writes and sends, UD sends up to the MTU."""
    for name, size in (("ib_write_bw", 65536), ("ib_send_bw", 65536), ("ib_write_lat", 64), ("ib_send_lat", 64)):
        perftest(ctx, name, size, "-c UC")
    for name, size in (("ib_send_bw", 2048), ("ib_send_lat", 64)):
        perftest(ctx, name, size, "-c UD")


def test_pingpongs_with_checked_data(ctx):
    """ibv_rc, uc, ud and srq_pingpong, polling and with events; the receiver checks every buffer."""
    for name in ("ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_srq_pingpong"):
        for options in ("-c", "-c -e", "-c -s 65537 -n 200", "-c -s 1048576 -n 50 -m 4096"):
            pingpong(ctx, name, options)
    for options in ("-c", "-c -e", "-c -s 1000"):
        pingpong(ctx, "ibv_ud_pingpong", options)


def test_a_guest_reaches_itself(ctx):
    """RDMA write and checked ping-pong within one guest, over its own port."""
    vm, (device, _) = ctx.lab.vms[0], devices(ctx)
    r = workloads.perftest(vm, vm, "127.0.0.1", "ib_write_bw", 65536, device=device)
    assert r["mib_per_s"] > 0, r
    clean(ctx)


def test_ten_seconds_of_writes(ctx):
    """ib_write_bw -D 10 keeps its pace and ends well."""
    server, client = ctx.lab.vms
    own, other = devices(ctx)
    running = server.guest.spawn(f"ib_write_bw -d {own} -F -s 65536 -D 10 2>&1")
    time.sleep(0.5)
    text = client.must(f"ib_write_bw -d {other} -F -s 65536 -D 10 {ctx.lab.ip(0)} 2>&1", 60)
    assert server.guest.wait(running, 60)[0] == 0
    assert any(line.split()[:1] == ["65536"] for line in text.splitlines()), text[-400:]
    clean(ctx)
