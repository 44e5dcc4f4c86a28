"""The RDMA function as the guest sees it: driver, device, port, and what its kernel says about them."""

import re
import time

from .errors import LabError

# By driver, not by name: udev, where there is one, renames the device.
FIND = {"mlx5_core": "for d in /sys/class/infiniband/*; do "
                     'case "$(readlink $d/device/driver)" in */mlx5_core) basename $d;; esac; done',
        # Linux's erdma does not say which PCI function its device is on; and there is no udev where this driver is.
        "erdma": "ls /sys/class/infiniband | grep ^erdma_; true"}
# Lines of a kernel log that speak of trouble, whatever their level.
TROUBLE = re.compile(r"WARNING:|(?-i:BUG:)|Call Trace|\bOops|general protection|hung task|soft lockup|hw csum failure|"
                     r"command timeout|timeout\. Will cause a leak|cmd_work_handler|"
                     r"health compromised|Fatal error|failed reclaiming pages", re.I)
# Two interfaces on one segment: Linux lets each of them answer for the addresses of both, unless told not to.
ARP = "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore; echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce"
OURS = re.compile(r"mlx5|erdma|infiniband|ib_core|ib_uverbs|pci 0000|pcieport", re.I)


def bring_up(vm, function, timeout=60):
    """Loads the driver, waits until the port is active; the name of the device, for `-d`."""
    modules = " ".join(function.modules)
    status, output = vm.run(f"modprobe -a {modules} 2>&1", timeout)
    if status != 0:
        raise LabError(f"{vm.name} cannot load {modules}: {output.strip()}; --no-rdma-function does without",
                       vm.console_log)
    name = device(vm, function.driver, timeout)
    if function.link_type == "ethernet":
        vm.must(f"{ARP}; n=$(ls /sys/class/infiniband/{name}/device/net | head -n1); ip link set $n mtu {function.mtu} up; "
                f"ip addr replace {function.ip}/24 dev $n", 20)
    deadline = time.monotonic() + timeout
    while "ACTIVE" not in (state := vm.must(f"cat /sys/class/infiniband/{name}/ports/1/state")):
        if time.monotonic() > deadline:
            raise LabError(f"port 1 of {name} in {vm.name} is `{state.strip()}` after {timeout} s", vm.console_log)
        time.sleep(0.2)
    return name


def devices(vm, driver="mlx5_core"):
    """Names of the RDMA devices of this driver."""
    return vm.must(FIND[driver]).split()


def device(vm, driver="mlx5_core", timeout=20):
    """Name of the RDMA device that the driver made of the function."""
    deadline = time.monotonic() + timeout
    while not (names := devices(vm, driver)):
        if time.monotonic() > deadline:
            said = vm.run(f"dmesg | grep -i {driver.partition('_')[0]} | tail -n 3")[1].strip()
            raise LabError(f"{vm.name} has no RDMA device of driver {driver} after {timeout} s"
                           f"{f': {said}' if said else ''}", vm.console_log)
        time.sleep(0.2)
    return names[0]


def complaints(vm):
    """Lines of the guest's kernel log that a healthy function does not cause."""
    found = []
    for line in vm.must("dmesg -r").splitlines():
        level = re.match(r"<(\d+)>", line)
        serious = level is not None and int(level[1]) % 8 <= 3 and OURS.search(line)
        if serious or TROUBLE.search(line):
            found.append(line)
    return found
