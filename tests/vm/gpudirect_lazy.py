"""Memory functions of 8 GiB, and an IOMMU that translates each page of the RDMA function's addresses too."""

import re

from lab import gpudirect
from rdma_function import clean

FLAVOUR = "backports"
LAB = {"mtu": 9000, "rdma": "ethernet", "memory": 1024, "gpu_mib": 8192}
# Before a driver has the function its group may get another kind of domain: of pages, unmapped lazily.
TRANSLATE = ("for d in /sys/bus/pci/devices/*; do "
             '[ "$(cat $d/vendor) $(cat $d/device)" = "0x15b3 0x101e" ] || continue; '
             "echo DMA-FQ >$d/iommu_group/type; cat $d/iommu_group/type; done")


def test_data_moves_although_system_memory_lies_in_thousands_of_maps(ctx):
    """RoCE between BARs and system memory behind a translating IOMMU; BAR addresses are the guest's own."""
    for vm in ctx.lab.vms:
        assert vm.must(TRANSLATE).split() == ["DMA-FQ"]
    names = ctx.lab.bring_up_rdma()
    for f in ctx.lab.rdma_functions:
        stats = next(s for s in ctx.lab.dpu.ctl("stats")["functions"] if s["name"] == f.name)
        assert stats["dma_ranges"] > 500, stats["dma_ranges"]
    for vm in ctx.lab.vms:
        listed = vm.must("lspci -nv -d 1234:6dba")
        place = re.search(r"Memory at ([0-9a-f]+) \(64-bit, prefetchable\).*\[size=8G\]", listed)
        assert place and int(place[1], 16) >= 1 << 32, listed
    results = gpudirect.run(ctx.lab, names, (4096, 1 << 20), ms=0)
    assert sum(r["what"] == "data" for r in results) == 9 and results[-1]["what"] == "revoked", results
    clean(ctx)
