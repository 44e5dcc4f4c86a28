"""RDMA between the memory functions of two guests: binds them to vfio-pci and runs `gpudirect` of the guest image."""

from . import workloads
from .errors import LabError

# The ids that the OM presents a memory function with.
FIND = ("for d in /sys/bus/pci/devices/*; do "
        '[ "$(cat $d/vendor) $(cat $d/device)" = "0x1234 0x6dba" ] && basename $d; done')
SIZES = (4096, 65536, 1 << 20)


def bind(vm):
    """Gives the guest's memory function to user space; its PCI address."""
    found = vm.must(f"{FIND}; true").split()
    if len(found) != 1:
        raise LabError(f"{vm.name} has {len(found)} memory functions instead of one", vm.console_log)
    address, = found
    vm.must("modprobe vfio-pci && modprobe vfio_iommu_type1", 60)
    path = f"/sys/bus/pci/devices/{address}"
    vm.must(f"[ -e {path}/driver ] || {{ echo vfio-pci >{path}/driver_override && echo {address} >/sys/bus/pci/drivers_probe; }}; "
            f'case "$(readlink {path}/driver)" in */vfio-pci) ;; *) dmesg | grep -i vfio | tail -n3; false;; esac', 30)
    return address


def run(lab, devices, sizes=SIZES, ms=300, timeout=300):
    """`gpudirect` from the last guest to the first: the words of its lines, as dictionaries. `devices`: of both ends."""
    server, client = lab.vms[0], lab.vms[-1]
    options = f"-s {','.join(map(str, sizes))} -t {ms}"
    own, other = [f"gpudirect -d {device} -g {bind(vm)} {options}"
                  for device, vm in zip((devices[0], devices[-1]), (server, client))]
    server.must(f"pkill -x gpudirect; {own} >/tmp/gpudirect.log 2>&1 </dev/null & sleep 0.5", 20)
    # At once at the end: the program leaves the only vCPU little time for the port that its lines take.
    kept = "/tmp/gpudirect.out"
    status, text = client.run(f"timeout {timeout} {other} {lab.ip(0)} >{kept} 2>&1; s=$?; cat {kept}; exit $s", timeout + 15)
    if status != 0:
        words = server.run("cat /tmp/gpudirect.log", 20)[1]
        raise LabError(f"gpudirect ended with {status}: {workloads.last_line(text)}; server: {workloads.last_line(words)}",
                       client.console_log)
    return [parse(line) for line in text.splitlines() if line.split()[:1] in (["data"], ["bandwidth"], ["revoked"])]


def parse(line):
    """`word key=value … ok` as `{"what": word, key: value, …}`; numbers are numbers."""
    what, *rest = line.split()
    pairs = (word.split("=", 1) for word in rest if "=" in word)
    return {"what": what, **{key: number(value) for key, value in pairs}}


def number(text):
    """A number when the text is one."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def rows(results):
    """Bandwidths as `(header, rows)` of a table: a row for each size and pair of places."""
    figures = {}
    for r in results:
        if r["what"] == "bandwidth":
            figures.setdefault((r["bytes"], r["own"], r["other"]), {})[r["kind"]] = r["mib_per_s"]
    names = {"bar": "device", "ram": "system"}
    return (["bytes", "own memory", "other's memory", "write MiB/s", "read MiB/s"],
            [[size, names[own], names[other], kinds.get("write", "-"), kinds.get("read", "-")]
             for (size, own, other), kinds in figures.items()])
