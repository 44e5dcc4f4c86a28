"""RDMA functions with the face of erdma under Linux's own driver and rdma-core's provider, both unmodified."""

from lab import workloads
from rdma_function import clean, devices

FLAVOUR = "erdma"
LAB = {"mtu": 9000, "rdma": "erdma", "rxe": False}


def perftest(ctx, name, size, options="", count=None):
    """One perftest from vm1 to vm0 over the functions; something was measured and no kernel complained."""
    server, client = ctx.lab.vms
    r = workloads.perftest(server, client, ctx.lab.ip(0), name, size, options, devices(ctx), count)
    assert all(value > 0 for value in r.values()) or size < 64, (name, size, options, r)
    clean(ctx)
    return r


def test_driver_probes_and_the_port_is_active(ctx):
    """erdma binds by the PCI ids and finds the virtio-net interface; ibv_devinfo shows an active RoCE port."""
    for vm, f, device in zip(ctx.lab.vms, ctx.lab.rdma_functions, devices(ctx)):
        listed = vm.must("lspci -nk -d 1ded:")
        assert "1ded:107f" in listed and "driver in use: erdma" in listed, listed
        info = vm.must(f"ibv_devinfo -v -d {device}")
        assert "PORT_ACTIVE" in info and "Ethernet" in info and "hca_id:\terdma" in info, info
        assert vm.must(f"cat /sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0").strip() == "eth0"
        gid = vm.must(f"cat /sys/class/infiniband/{device}/ports/1/gids/1").strip()
        octets = [int(octet) for octet in f.ip.split(".")]
        assert gid == f"0000:0000:0000:0000:0000:ffff:{octets[0]:02x}{octets[1]:02x}:{octets[2]:02x}{octets[3]:02x}", gid
        told = ctx.lab.dpu.function(f.name)
        assert told["state"] == "running" and told["link"] == "up", told
    clean(ctx)


def test_perftest_of_every_kind(ctx):
    """Writes, reads, sends with events, atomics, latency."""
    for name, size, options in (("ib_write_bw", 65536, ""), ("ib_read_bw", 65536, ""), ("ib_send_bw", 4096, "-e"),
                                ("ib_atomic_bw", 8, ""), ("ib_write_lat", 2, "")):
        perftest(ctx, name, size, options)


def test_rping_checks_its_data(ctx):
    """rdma_cm connects through queue pair 1; rping compares what comes back."""
    server, client = ctx.lab.vms
    devices(ctx)
    server.must("pkill -x rping; (rping -s -P >/tmp/rping.log 2>&1 </dev/null &); sleep 0.5", 20)
    said = client.must(f"timeout 60 rping -c -V -v -C 5 -a {ctx.lab.ip(0)} 2>&1", 70)
    assert said.count("ping data:") == 5, said
    server.must("pkill -x rping")
    clean(ctx)
