"""More of RDMA functions with Ethernet ports: connections made by rdma_cm in all kinds, pingpongs by GID."""

from rdma_ethernet import LAB, clean, devices, gid_index, perftest  # noqa: F401
from rdma_function import pingpong

TESTS = ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_write_lat", "ib_read_lat", "ib_send_lat")


def by_cm(ctx, name, size, options=""):
    """One perftest whose queue pairs are connected by rdma_cm, over the mlx5e interfaces."""
    devices(ctx)
    perftest(ctx, name, size, f"-R {options}", ctx.lab.rdma_functions[0].ip)


def test_rdma_cm_connects_every_kind(ctx):
    """`-R` with writes, reads, sends and atomics, many queue pairs, events, datagrams."""
    for name in TESTS:
        for size in (64, 65536, 1 << 20) if name.endswith("bw") else (64, 65536):
            by_cm(ctx, name, size)
    for name in ("ib_atomic_bw", "ib_atomic_lat"):
        by_cm(ctx, name, 8)
    for name in ("ib_write_bw", "ib_read_bw", "ib_send_bw"):
        by_cm(ctx, name, 65536, "-q 8")
    for name in ("ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"):
        by_cm(ctx, name, 4096, "-e")
    for name in ("ib_send_bw", "ib_send_lat"):
        by_cm(ctx, name, 1024, "-c UD")
    clean(ctx)


def test_pingpongs_by_gid(ctx):
    """ibv_rc, uc, ud and srq_pingpong with the GID of the IPv4 address; the receiver checks every buffer."""
    indices = {gid_index(vm, device) for vm, device in zip(ctx.lab.vms, devices(ctx))}
    assert len(indices) == 1, indices
    index = indices.pop()
    for name in ("ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_srq_pingpong"):
        for options in ("-c", "-c -e", "-c -s 65537 -n 200"):
            pingpong(ctx, name, f"-g {index} {options}")
    for options in ("-c", "-c -e -s 1000"):
        pingpong(ctx, "ibv_ud_pingpong", f"-g {index} {options}")
