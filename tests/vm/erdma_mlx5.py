"""A guest with mlx5's driver and one with erdma's on one network, in both directions."""

from lab import workloads
from rdma_function import clean

FLAVOUR = "erdma"
LAB = {"mtu": 9000, "rdma": ["ethernet", "erdma"], "rxe": False}
# Outstanding reads and atomics: perftest would take the larger of the two devices' limits.
READS = "-o 16"


def bring_up(ctx):
    """Names of the devices, and the index of each one's link-local RoCE v2 GID: an address that needs no route."""
    names = ctx.lab.bring_up_rdma()
    indices = []
    for vm, name in zip(ctx.lab.vms, names):
        ports = f"/sys/class/infiniband/{name}/ports/1"
        found = vm.must(f"for i in $(seq 0 15); do grep -q 'RoCE v2' {ports}/gid_attrs/types/$i 2>/dev/null && "
                        f"grep -q ^fe80: {ports}/gids/$i && echo $i; done; true").split()
        assert found, (vm.name, name)
        indices.append(found[0])
    return names, indices


def perftest(ctx, server, client, name, size, options=""):
    """One perftest between guests by their numbers."""
    names, indices = bring_up(ctx)
    vms = ctx.lab.vms
    devices = [f"{names[n]} -x {indices[n]}" for n in (server, client)]
    r = workloads.perftest(vms[server], vms[client], ctx.lab.ip(server), name, size, options, devices, 500)
    assert all(value > 0 for value in r.values()) or size < 64, (name, size, options, r)
    clean(ctx)


def test_both_directions(ctx):
    """Writes, reads, sends and atomics from either to the other."""
    for server, client in ((0, 1), (1, 0)):
        for name, size, options in (("ib_write_bw", 65536, ""), ("ib_read_bw", 65536, READS), ("ib_send_bw", 4096, "-e"),
                                    ("ib_write_bw", 1 << 20, "-q 4"), ("ib_atomic_bw", 8, READS), ("ib_write_lat", 2, "")):
            perftest(ctx, server, client, name, size, options)
