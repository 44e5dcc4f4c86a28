"""Soft RoCE over the DPU's virtio-net functions, by perftest."""

from lab import workloads

LAB = {"mtu": 9000}


def test_write_send_and_read_bandwidth(ctx):
    """ib_write_bw, ib_send_bw and ib_read_bw move data at 4 KiB and 64 KiB."""
    server, client = ctx.lab.vms
    for name in ("ib_write_bw", "ib_send_bw", "ib_read_bw"):
        for size in (4096, 65536):
            r = workloads.perftest(server, client, ctx.lab.ip(0), name, size)
            assert r["mib_per_s"] > 0.1, (name, size, r)


def test_write_latency(ctx):
    """ib_write_lat ends and prints a time."""
    r = workloads.perftest(*ctx.lab.vms, ctx.lab.ip(0), "ib_write_lat", 2)
    assert r["typical_us"] > 0, r
