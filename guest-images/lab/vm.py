"""One guest: QEMU's command line, the control console, QMP, and how it ends."""

import json
import os
import socket
import subprocess
import sys
import time

from . import host
from .errors import LabError, tail

sys.path.insert(0, os.path.join(host.ROOT, "guest-images"))
from guestctl import Guest  # noqa: E402

# Arguments that the vfio-user clients accept and get silently wrong, with what to say.
REFUSED = (
    ("share=off", "guest memory must be shared: with share=off the device never sees what the guest writes"),
    ("-incoming", "migration of a vfio-user device loses its state without an error"),
    ("-loadvm", "a snapshot of a vfio-user device has no device state"),
    ("-mem-path", "use the lab's own memory backend, which is shared; -mem-path memory is not"),
)


def check_arguments(extra):
    """Refuses extra QEMU arguments that would break the device without a message."""
    for argument in extra:
        for pattern, why in REFUSED:
            if pattern in argument:
                raise LabError(f"`{argument}` is refused: {why}")
        if "memory-backend" in argument and "share=on" not in argument:
            raise LabError(f"`{argument}` is refused: a memory backend needs share=on")


# An IOMMU for guests that give a device to user space. vfio-user needs the caching mode.
IOMMU = ["-device", "intel-iommu,intremap=on,caching-mode=on"]
# A PCIe switch with two ports, `rp1` and `rp2`. It has no access control, so that what is behind it may reach each
# other directly: Linux then allows peer-to-peer transfers on every processor.
SWITCH = ["-device", "pcie-root-port,id=rp0,chassis=1,slot=1", "-device", "x3130-upstream,id=up,bus=rp0",
          "-device", "xio3130-downstream,id=rp1,bus=up,chassis=11,slot=1",
          "-device", "xio3130-downstream,id=rp2,bus=up,chassis=12,slot=2"]


class Boot:
    """What a guest boots: the project's image, a user's kernel, or a user's disk."""

    def __init__(self, kernel, initrd, image=None, seed=None, append=""):
        self.kernel, self.initrd, self.image, self.seed = kernel, initrd, image, seed
        self.append = append

    def arguments(self, command_line):
        """QEMU arguments; a user's disk is never written to."""
        args = []
        if self.image:
            # Without a boot index the firmware would start from the seed, which has a boot sector too.
            args += ["-drive", f"file={self.image},if=none,id=disk,snapshot=on,format={image_format(self.image)}",
                     "-device", "virtio-blk-pci,drive=disk,bootindex=1"]
            if self.seed:
                args += ["-blockdev", json.dumps({"driver": "vvfat", "node-name": "seed", "dir": self.seed,
                                                  "label": "CIDATA", "read-only": True}),
                         "-device", "virtio-blk-pci,drive=seed"]
        if self.kernel:
            args += ["-kernel", self.kernel, "-append", f"{command_line} {self.append}".strip()]
            if self.initrd:
                args += ["-initrd", self.initrd]
        return args


def image_format(path):
    """`qcow2` or `raw`; refuses what is neither a disk with a boot sector nor a qcow2 file."""
    try:
        with open(path, "rb") as f:
            head = f.read(512)
    except OSError as e:
        raise LabError(f"the image {path} cannot be read: {e.strerror}")
    if head[:4] == b"QFI\xfb":
        return "qcow2"
    if len(head) == 512 and head[510:] == b"\x55\xaa":
        return "raw"
    with open(path, "rb") as f:
        f.seek(1024 + 56)
        if f.read(2) == b"\x53\xef":  # ext4 without a partition table, for use with --kernel
            return "raw"
    raise LabError(f"{path} is no disk image: it has neither a qcow2 header nor a boot sector; "
                   "download a qcow2 or raw cloud image")


def root_device(path):
    """Where the kernel finds the root of an image: on the whole disk if a file system starts there, else in its
    first partition, as cloud images have it."""
    with open(path, "rb") as f:
        f.seek(1024 + 56)
        return "/dev/vda" if f.read(2) == b"\x53\xef" else "/dev/vda1"


class Vm:
    """A guest with its NICs. `nics` holds lists of QEMU arguments; see `dpu_nic`, `vhost_nic` and `tap_nic`."""

    def __init__(self, name, run_dir, qemu, boot, nics, accel="tcg", memory=512, cpus=1,
                 command_line="", extra=(), keep=False, machine=None):
        check_arguments(extra)
        self.name, self.run_dir, self.keep = name, run_dir, keep
        self.log = os.path.join(run_dir, f"{name}.log")
        self.console_log = os.path.join(run_dir, f"{name}.console.log")
        self.process = None
        self.guest = Guest(self.path("ctl"))
        line = f"console=ttyS0 quiet loglevel=4 panic=1 tsc=reliable mitigations=off cryptomgr.notests dpu.ctl=ttyS1 dpu.name={name} {command_line}"
        self.argv = [
            qemu, "-name", name, "-nodefaults", "-no-user-config", "-display", "none",
            "-accel", accel, "-cpu", "host" if accel == "kvm" else "max", "-smp", str(cpus),
            "-machine", "q35,memory-backend=mem0" + (f",{machine}" if machine else ""), "-m", f"{memory}M",
            "-object", f"memory-backend-memfd,id=mem0,size={memory}M,share=on",
            "-chardev", f"socket,id=con,path={self.path('con')},server=on,wait=off,logfile={self.console_log}",
            "-serial", "chardev:con",
            "-chardev", f"socket,id=ctl,path={self.path('ctl')},server=on,wait=off", "-serial", "chardev:ctl",
            "-qmp", f"unix:{self.path('qmp')},server=on,wait=off",
            *boot.arguments(line), *[a for nic in nics for a in nic], *extra,
        ]

    def path(self, kind):
        """A socket of this guest: `con`, `ctl` or `qmp`."""
        return os.path.join(self.run_dir, f"{self.name}.{kind}")

    def start(self):
        """Starts QEMU; the guest boots on."""
        self.process = host.start(self.argv, self.log, self.keep)
        deadline = time.monotonic() + 10
        while not os.path.exists(self.path("ctl")):
            self.check()
            if time.monotonic() > deadline:
                raise LabError(f"QEMU of {self.name} made no control socket", self.log)
            time.sleep(0.02)
        return self

    def check(self):
        """Fails with QEMU's last words when it is gone."""
        if self.process.poll() is not None:
            raise LabError(f"QEMU of {self.name} ended with status {self.process.returncode}: "
                           f"{tail(self.log, 1)}", self.log)

    def wait_ready(self, timeout=120):
        """Returns when the guest's agent answers."""
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                self.guest.wait_ready(min(5, max(0.1, deadline - time.monotonic())))
                return self
            except Exception as e:  # the agent is not there yet, or QEMU went away under it
                if time.monotonic() > deadline:
                    raise LabError(f"{self.name} did not come up in {timeout} s: {e}", self.console_log)
                time.sleep(0.05)

    def run(self, command, timeout=60):
        """`(status, output)` of a shell command in the guest."""
        self.check()
        return self.guest.run(command, timeout)

    def must(self, command, timeout=60):
        """Output of a command that has to succeed."""
        status, output = self.run(command, timeout)
        if status != 0:
            raise LabError(f"in {self.name}, `{command}` ended with {status}: {output.strip()[-600:]}",
                           self.console_log)
        return output

    def qmp(self, command, **arguments):
        """One QMP command; its return value."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(10)
            s.connect(self.path("qmp"))
            lines = s.makefile("rw")
            lines.readline()
            for message in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                lines.write(json.dumps(message) + "\n")
                lines.flush()
                while True:
                    answer = json.loads(lines.readline() or '{"error": {"desc": "QEMU closed the socket"}}')
                    if "return" in answer or "error" in answer:
                        break
            if "error" in answer:
                raise LabError(f"QMP {command} on {self.name}: {answer['error']['desc']}", self.log)
            return answer["return"]

    def stop(self):
        """Powers the guest off; ends QEMU when the guest does not."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            self.qmp("quit")
            self.process.wait(5)
        except (OSError, LabError, ValueError, subprocess.TimeoutExpired):
            host.stop(self.process)

    def kill(self):
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()


def dpu_nic(socket_path, bus_addr=None, bus=None):
    """A function of the DPU, by its vfio-user socket."""
    device = {"driver": "vfio-user-pci", "socket": {"type": "unix", "path": socket_path}}
    if bus_addr:
        device["addr"] = bus_addr
    if bus:
        device["bus"] = bus
    return ["-device", json.dumps(device)]


def vhost_nic(socket_path, function):
    """QEMU's own virtio-net with a function of the DPU behind it, by its vhost-user socket."""
    f, queues = function, function.queue_pairs
    mq = f",mq=on,vectors={2 * queues + 2}" if queues > 1 else ""
    # An EM that died is there again soon.
    return ["-chardev", f"socket,id={f.name}s,path={socket_path},reconnect-ms=100",
            "-netdev", f"vhost-user,id={f.name},chardev={f.name}s,queues={queues}",
            "-device", f"virtio-net-pci,id={f.name}p,netdev={f.name},mac={f.mac},disable-legacy=on,host_mtu={f.mtu},"
                       f"speed=25000,duplex=full{mq}"]


def tap_nic(interface, mac, queues=1):
    """QEMU's own virtio-net on a TAP, for comparison."""
    mq = f",queues={queues}" if queues > 1 else ""
    vectors = f",mq=on,vectors={2 * queues + 2}" if queues > 1 else ""
    return ["-netdev", f"tap,id={interface},ifname={interface},script=no,downscript=no,vhost=off{mq}",
            "-device", f"virtio-net-pci,netdev={interface},mac={mac},disable-legacy=on{vectors}"]
