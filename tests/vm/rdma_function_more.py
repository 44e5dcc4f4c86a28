"""More of the RDMA function: latency, atomics, events, many queue pairs, all services, checked data."""

from lab import workloads
from rdma_function import LAB, LAT_TESTS, RC_TESTS, clean, devices, perftest, pingpong, timed_writes  # noqa: F401


def every_size(ctx, name, options="", count=100):
    """All powers of two from 2 bytes to 8 MiB in one run; its last row comes when all others are done."""
    server, client = ctx.lab.vms
    r = workloads.perftest(server, client, ctx.lab.ip(0), name, 8 << 20, f"-a {options}", devices(ctx), count)
    assert all(value > 0 for value in r.values()), (name, options, r)
    clean(ctx)


def test_every_size(ctx):
    """Bandwidth and latency of write, read and send, of all sizes."""
    for name in RC_TESTS:
        every_size(ctx, name)
    for name in LAT_TESTS:
        every_size(ctx, name, count=20)


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
    perftest(ctx, "ib_atomic_bw", 8, "-q 8")


def test_completion_events(ctx):
    """`-e`: the CPU sleeps until the MSI-X of a completion (perftest has that for all but writes)."""
    for name in ("ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"):
        for options in ("-e", "-e -q 8") if name.endswith("bw") else ("-e",):
            for size in (64, 65536):
                perftest(ctx, name, size, options)
    for name in ("ib_atomic_bw", "ib_atomic_lat"):
        perftest(ctx, name, 8, "-e")


def test_many_queue_pairs_and_both_directions(ctx):
    """`-q 8`, `-b`, and both."""
    for options in ("-q 8", "-b", "-q 8 -b"):
        for name in RC_TESTS:
            perftest(ctx, name, 65536, options)
    for name in RC_TESTS:
        perftest(ctx, name, 1 << 20, "-q 8")


def test_inline_and_unsignalled(ctx):
    """`--inline_size` up to what the device says it can, and many requests with one completion."""
    for size in (2, 64, 220):
        for name in ("ib_write_lat", "ib_send_lat", "ib_write_bw", "ib_send_bw"):
            perftest(ctx, name, size, f"--inline_size={size}")
    for moderation in (1, 64):
        perftest(ctx, "ib_write_bw", 4096, f"-Q {moderation}")


def test_unreliable_transports(ctx):
    """UC writes and sends of all sizes, UD sends up to the MTU."""
    for name in ("ib_write_bw", "ib_send_bw", "ib_write_lat", "ib_send_lat"):
        every_size(ctx, name, "-c UC", 50 if name.endswith("bw") else 20)
    for name in ("ib_send_bw", "ib_send_lat"):
        for size in (2, 64, 2048, 4096):
            perftest(ctx, name, size, "-c UD")
    for options in ("-c UD -q 8", "-c UD -e", "-c UC -q 8"):
        perftest(ctx, "ib_send_bw", 2048, options)
    perftest(ctx, "ib_send_bw", 64, "-c UD --inline_size=64")


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


def test_five_minutes_of_writes(ctx):
    """ib_write_bw -D 300 keeps its pace and ends well."""
    timed_writes(ctx, 300)
