"""A whole lab: DPU, guests, and an end that leaves nothing behind."""

import os
import shutil
import tempfile

from . import host, rdma
from .dpu import Dpu, ErdmaFunction, Function, MemoryFunction, RdmaFunction
from .errors import LabError
from .vm import IOMMU, SWITCH, Boot, Vm, dpu_nic, vhost_nic


# How build-guest.sh makes each kind of image.
FLAVOURS = {None: (), "backports": ("--kernel", "backports"), "erdma": ("--erdma",)}


def find_parts(kernel=None, flavour=None):
    """Set-up: `(qemu, boot)` from the cached QEMU and guest image, made where they are missing. `flavour`:
    `backports` or `erdma`, see build-guest.sh."""
    host.say("QEMU with vfio-user (made once, then cached)")
    qemu = host.script("get-qemu.sh")
    host.say("guest image (made once, then cached)")
    image = host.script("build-guest.sh", *FLAVOURS[flavour])
    # The unpacked kernel starts about a second sooner under emulation.
    own = next(k for k in ("vmlinux", "vmlinuz") if os.path.exists(os.path.join(image, k)))
    boot = Boot(kernel or os.path.join(image, own), next(
        os.path.join(image, f) for f in sorted(os.listdir(image)) if f.startswith("initramfs")))
    return qemu, boot


def make_rdma(index, kind, mtu, mapped_doorbells):
    """The RDMA function of guest `index`."""
    if kind == "erdma":
        return ErdmaFunction(index, mtu)
    return RdmaFunction(index, kind, mtu, mapped_doorbells)


class Lab:
    """`with Lab(...) as lab:` brings everything up and takes all of it down again."""

    def __init__(self, qemu, boot, guests=2, accel="tcg", memory=512, cpus=1, mtu=1500, queue_pairs=1,
                 queue_size=256, rxe=True, extra=(), keep=False, boots=None, rdma=None,
                 mapped_doorbells=True, gpu_mib=None, face="vfio-user", iommu=None):
        """`rdma`: what RDMA function each guest gets beside its virtio-net function: `ethernet` or `infiniband`, a port
        of that kind under mlx5; `erdma`, which takes a boot of that flavour; None; or a list with one for each guest.
        `gpu_mib`: size of a memory function that each guest gets, behind one PCIe switch with its RDMA function and
        with an IOMMU, so that it can be used from there; or None. `face`: what QEMU sees of the virtio-net functions,
        `vfio-user` or `vhost-user`, or a list with one for each guest. `iommu`: `translate` for an IOMMU through which
        all drivers of a guest go; with a memory function the IOMMU is there for user space only."""
        self.run_dir = tempfile.mkdtemp(prefix="distdpu-")
        self.keep, self.failed = keep, False
        faces = [face] * guests if isinstance(face, str) else face
        self.functions = [Function(i, mtu, queue_pairs, queue_size, face=faces[i]) for i in range(guests)]
        kinds = [rdma] * guests if isinstance(rdma, str) else rdma or []
        self.rdma_functions = [make_rdma(i, kind, mtu, mapped_doorbells) for i, kind in enumerate(kinds)]
        self.memory_functions = [MemoryFunction(i, gpu_mib) for i in range(guests)] if gpu_mib else []
        self.dpu = Dpu(self.run_dir, self.functions + self.rdma_functions + self.memory_functions, keep)
        self.settings = dict(qemu=qemu, accel=accel, memory=memory, cpus=cpus, extra=extra, keep=keep)
        self.boots = boots(self.run_dir) if boots else [boot] * guests
        self.rxe, self.mtu, self.iommu = rxe, mtu, iommu
        self.vms = [self.make_vm(i) for i in range(guests)]

    def make_vm(self, index):
        """A fresh guest on function `index`; the caller starts it."""
        f = self.functions[index]
        line = f"dpu.ip={f.ip}/24 dpu.mtu={self.mtu}" + (" dpu.rxe=1" if self.rxe else "")
        # virtio-net first, so that it is eth0
        vhost = f.face == "vhost-user"
        nics = [vhost_nic(self.dpu.socket(f), f) if vhost else dpu_nic(self.dpu.socket(f))]
        buses = ["rp1", "rp2"] if self.memory_functions else [None, None]
        for bus, own in zip(buses, (self.rdma_functions, self.memory_functions)):
            nics += [dpu_nic(self.dpu.socket(function), bus=bus) for function in own[index:index + 1]]
        if self.memory_functions:
            nics = [IOMMU, SWITCH] + nics
            line += " intel_iommu=on iommu=pt"
        elif self.iommu:
            nics = [IOMMU] + nics
            line += " intel_iommu=on iommu=nopt"
        return Vm(f"vm{index}", self.run_dir, boot=self.boots[index], nics=nics, command_line=line,
                  machine="kernel-irqchip=split" if self.memory_functions or self.iommu else None, **self.settings)

    def replace_vm(self, index):
        """A new guest in the place of one that ended."""
        for kind in ("con", "ctl", "qmp"):
            if os.path.exists(self.vms[index].path(kind)):
                os.unlink(self.vms[index].path(kind))
        self.vms[index] = self.make_vm(index)
        return self.vms[index]

    def bring_up_rdma(self, timeout=60):
        """Loads the driver of the RDMA functions, which stays away until it is wanted; the names of the devices."""
        return [rdma.bring_up(vm, f, timeout) for vm, f in zip(self.vms, self.rdma_functions)]

    def ip(self, index):
        """The address of guest `index` on the DPU's network."""
        return self.functions[index].ip

    def __enter__(self):
        try:
            self.dpu.start()
            for vm in self.vms:
                vm.start()
            return self
        except BaseException:
            self.__exit__(LabError, None, None)
            raise

    def wait_ready(self, timeout=120):
        """Returns when every guest answers and its interface has carrier."""
        for vm in self.vms:
            vm.wait_ready(timeout)
        return self

    def __exit__(self, kind, value, trace):
        self.failed = kind is not None
        if self.keep and not self.failed:
            return
        for vm in self.vms:
            vm.stop()
        self.dpu.stop()
        if not self.failed:
            shutil.rmtree(self.run_dir, ignore_errors=True)
