"""Memory functions: stock drivers move data between the BARs of two guests, through DOT windows."""

from lab import gpudirect
from recovery import replace
from rdma_function import clean, devices

FLAVOUR = "backports"
LAB = {"mtu": 9000, "rdma": "infiniband", "memory": 1024, "gpu_mib": 256}
SIZES = (1, 4096, 65536, 1 << 20, 16 << 20)


def test_the_guest_sees_an_accelerator_with_a_large_bar(ctx):
    """lspci shows the class and a 64-bit prefetchable BAR; dpuctl shows its size."""
    for vm, f in zip(ctx.lab.vms, ctx.lab.memory_functions):
        listed = vm.must("lspci -nv -d 1234:6dba")
        assert "1200" in listed and "64-bit, prefetchable" in listed and "256M" in listed, listed
        address = gpudirect.bind(vm)
        vm.must(f"echo 1 >/sys/bus/pci/devices/{address}/reset")
        assert ctx.lab.dpu.function(f.name)["memory"]["bytes"] == 256 << 20


def test_data_moves_between_device_and_system_memory_of_both_guests(ctx):
    """Write, read and send between BARs and system memory, compared by the CPUs; a BAR that goes away is an error."""
    results = gpudirect.run(ctx.lab, devices(ctx), SIZES, ms=100)
    data = {(r["own"], r["other"], r["bytes"]) for r in results if r["what"] == "data"}
    assert data >= {(own, other, size) for own in ("bar", "ram") for other in ("bar", "ram") for size in SIZES}, data
    assert [r for r in results if r["what"] == "revoked"], "the end is missing"
    for f in ctx.lab.memory_functions:
        # The program gave it back, and the kernel switched it off or reset it.
        assert ctx.lab.dpu.function(f.name)["state"] in ("connected", "running")
    clean(ctx)


def test_the_memory_function_s_em_may_be_killed(ctx):
    """Its EM is replaced while no program uses the memory; the next use works."""
    names = devices(ctx)
    for f in ctx.lab.memory_functions:
        replace(ctx, f.em)
    results = gpudirect.run(ctx.lab, names, (65536,), ms=0)
    assert sum(r["what"] == "data" for r in results) >= 4
    clean(ctx)
