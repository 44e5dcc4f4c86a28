"""virtio-net behind an IOMMU of the guest: the driver maps each buffer for as long as it is in use."""

from lab import workloads
from recovery import complaints

LAB = {"mtu": 9000, "rxe": False, "memory": 1024, "iommu": "translate"}
ACCESS_PLATFORM = 33
FUNCTION = "/sys/bus/pci/devices/$(basename $(readlink -f /sys/class/net/eth0/device/..))"


def works(ctx):
    """Ping, TCP both ways, maps that the DPU counts, and a kernel with nothing to say."""
    server, client = ctx.lab.vms
    for size in (56, 8972):
        r = workloads.ping(client, ctx.lab.ip(0), 200, size)
        assert r["lost"] == 0, (size, r)
    for options in ("", "-R"):
        r = workloads.iperf3(server, client, ctx.lab.ip(0), 3, options)
        print(f"   {options or 'to vm0'}: {r['mbit_per_s']:.0f} Mbit/s", flush=True)
        assert r["mbit_per_s"] > 5, (options, r)
    for f in ctx.lab.functions:
        stats = next(s for s in ctx.lab.dpu.ctl("stats")["functions"] if s["name"] == f.name)
        assert stats["dma_ranges"] > 100, stats["dma_ranges"]
        bad = {q["name"]: q["drops"] for q in stats["queues"] if any("chain" in reason for reason in q["drops"])}
        assert not bad, bad
    for vm in ctx.lab.vms:
        assert not complaints(vm), complaints(vm)
        faults = vm.must("dmesg | grep -iE 'DMAR.*(fault|error)|swiotlb' || true").strip()
        assert not faults, faults


def test_driver_takes_the_platforms_addresses(ctx):
    """The driver negotiates ACCESS_PLATFORM, its function is translated, and buffers are unmapped at once."""
    for vm in ctx.lab.vms:
        bits = vm.must("cat /sys/class/net/eth0/device/features").strip()
        assert bits[ACCESS_PLATFORM] == "1", bits
        assert vm.must(f"cat {FUNCTION}/iommu_group/type").strip() in ("DMA", "DMA-FQ")
    works(ctx)


def test_buffers_that_are_unmapped_lazily(ctx):
    """The same with a domain whose unmaps come late and many at a time."""
    for vm, f in zip(ctx.lab.vms, ctx.lab.functions):
        kind = vm.must(f"d=$(readlink -f {FUNCTION}); a=$(basename $d); p=/sys/bus/pci/drivers/virtio-pci; "
                       "echo $a >$p/unbind && echo DMA-FQ >$d/iommu_group/type && echo $a >$p/bind; "
                       "cat $d/iommu_group/type")
        assert kind.strip() == "DMA-FQ", kind
        vm.must("for i in $(seq 50); do [ -e /sys/class/net/eth0 ] && break; sleep 0.1; done; "
                f"ip addr add {f.ip}/24 dev eth0; ip link set eth0 mtu 9000 up; "
                "for i in $(seq 50); do grep -q 1 /sys/class/net/eth0/carrier && break; sleep 0.1; done", 30)
    works(ctx)
