"""The DPU's side of a lab: writes the OM's file, starts the OM (which starts the EMs), asks dpuctl."""

import json
import os
import subprocess
import time

from . import host
from .errors import LabError, tail


class Function:
    """A virtio-net function of one guest."""

    def __init__(self, index, mtu=1500, queue_pairs=1, queue_size=256, rail=0, face="vfio-user"):
        self.em = f"em{index}" if rail == 0 else f"em{index}r{rail}"
        self.name = f"net{index}" if rail == 0 else f"net{index}r{rail}"
        self.mac = f"02:00:00:00:{rail:02x}:{index + 1:02x}"
        self.ip = f"10.0.{rail}.{index + 1}"
        self.mtu, self.queue_pairs, self.queue_size = mtu, queue_pairs, queue_size
        self.port, self.face = None, face

    def toml(self):
        """This function as a table of the OM's file, below that of its EM."""
        wire = f"port = {self.port}" if self.port else 'network = "lab"'
        return (f'  [[em.function]]\n  name = "{self.name}"\n'
                f'  kind = "virtio-net"\n  mac = "{self.mac}"\n  ip = "{self.ip}/24"\n  mtu = {self.mtu}\n'
                f"  queue_pairs = {self.queue_pairs}\n  queue_size = {self.queue_size}\n  speed_mbps = 25000\n  {wire}\n"
                + (f'  face = "{self.face}"\n' if self.face != "vfio-user" else ""))


class MemoryFunction:
    """A memory function of one guest, on an EM of its own."""

    def __init__(self, index, size_mib=256):
        self.em, self.name, self.vm = f"gpu{index}", f"gpu{index}", f"vm{index}"
        self.size_mib = size_mib

    def toml(self):
        """This function as a table of the OM's file, below that of its EM."""
        return (f'  [[em.function]]\n  name = "{self.name}"\n  kind = "memory"\n  vm = "{self.vm}"\n'
                f"  size_mib = {self.size_mib}\n")


class RdmaFunction:
    """An RDMA function of one guest, on the EM of its virtio-net function."""

    # What the guest's kernel loads for it, and the driver that then has it.
    modules, driver = ("mlx5_ib",), "mlx5_core"

    def __init__(self, index, link_type="ethernet", mtu=1500, mapped_doorbells=True):
        self.em, self.name, self.vm = f"em{index}", f"rdma{index}", f"vm{index}"
        self.mac = f"02:00:00:01:00:{index + 1:02x}"
        # of its network interface, which there is with link type Ethernet only
        self.ip = f"10.1.0.{index + 1}"
        self.link_type, self.mtu, self.mapped_doorbells = link_type, mtu, mapped_doorbells

    def toml(self):
        """This function as a table of the OM's file, below that of its EM."""
        return (f'  [[em.function]]\n  name = "{self.name}"\n'
                f'  kind = "rdma"\n  vm = "{self.vm}"\n  mac = "{self.mac}"\n  link_type = "{self.link_type}"\n  mtu = {self.mtu}\n'
                f'  mapped_doorbells = {str(self.mapped_doorbells).lower()}\n  network = "lab"\n')


class ErdmaFunction(RdmaFunction):
    """An RDMA function with the face of Alibaba's erdma. Its network interface is the guest's virtio-net function, which
    the driver finds by the MAC address."""

    modules, driver = ("ib_uverbs", "rdma_ucm", "erdma"), "erdma"

    def __init__(self, index, mtu=1500):
        super().__init__(index, "erdma", mtu)
        net = Function(index)
        self.name, self.mac, self.ip = f"erdma{index}", net.mac, net.ip

    def toml(self):
        """This function as a table of the OM's file, below that of its EM."""
        return (f'  [[em.function]]\n  name = "{self.name}"\n'
                f'  kind = "erdma"\n  mac = "{self.mac}"\n  mtu = {self.mtu}\n  network = "lab"\n')


class Dpu:
    """One OM with its EMs in `run_dir`."""

    def __init__(self, run_dir, functions, keep=False):
        self.run_dir, self.functions, self.keep = run_dir, functions, keep
        self.log = os.path.join(run_dir, "om.log")
        self.config = os.path.join(run_dir, "distdpu.toml")
        self.process = None

    def start(self, timeout=15):
        """Brings OM and EMs up; returns when every function waits for its VMM."""
        with open(self.config, "w") as f:
            f.write(f'[dpu]\nrun_dir = "{self.run_dir}"\n\n[[network]]\nname = "lab"\n\n')
            for em in dict.fromkeys(function.em for function in self.functions):
                f.write(f'[[em]]\nname = "{em}"\n\n')
                f.write("\n".join(function.toml() for function in self.functions if function.em == em) + "\n")
        self.process = host.start([host.program("om"), "--config", self.config], self.log, self.keep)
        deadline = time.monotonic() + timeout
        while True:
            if self.process.poll() is not None:
                raise LabError(f"the OM ended at once: {tail(self.log, 1)}", self.log)
            try:
                functions = self.ctl("functions")["functions"]
            except LabError:
                functions = []  # the OM does not answer yet
            for f in functions:
                if f["fault"]:
                    raise LabError(f"the EM {f['em']} does not serve {f['name']}: {f['fault']}", self.log)
            if functions and all(f["state"] != "absent" for f in functions):
                return self
            if time.monotonic() > deadline:
                raise LabError(f"the EMs were not up after {timeout} s", self.log)
            time.sleep(0.05)

    def ctl(self, *words):
        """`dpuctl --json …`, parsed."""
        done = subprocess.run(
            [host.program("dpuctl"), "--socket", os.path.join(self.run_dir, "dpuctl.sock"), "--json", *words],
            capture_output=True, text=True)
        if done.returncode != 0:
            raise LabError(done.stderr.strip() or f"dpuctl {' '.join(words)} failed", self.log)
        return json.loads(done.stdout)

    def socket(self, function):
        """The vfio-user or vhost-user socket of a function."""
        return os.path.join(self.run_dir, f"{function.name}.sock")

    def function(self, name):
        """What the OM says about one function."""
        return next(f for f in self.ctl("functions")["functions"] if f["name"] == name)

    def em_pids(self):
        """Process ids of the EMs by name."""
        return {em["name"]: em["pid"] for em in self.ctl("status")["ems"]}

    def alive(self):
        """Whether the OM runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self):
        """Ends OM and EMs."""
        host.stop(self.process)
