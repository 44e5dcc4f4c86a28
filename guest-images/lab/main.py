"""The main job behind `./run-vm.sh`."""

import argparse
import json
import os
import select
import signal
import socket
import stat
import sys
import termios
import time
import tty

from . import gpudirect, host, workloads
from .cloudinit import make_seed
from .errors import LabError
from .report import table, write_json
from .session import Lab, find_parts
from .vm import Boot, check_arguments, image_format, root_device

SIZES = (2, 4096, 65536, 1048576)
KEPT = os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/tmp"), "distdpu-kept.json")


def arguments(argv):
    """The command line of run-vm.sh."""
    p = argparse.ArgumentParser(
        prog="run-vm.sh", description="Boot guests on a software DPU and run RDMA between them.")
    p.add_argument("--guests", type=int, default=2, metavar="N", help="guests, each on an EM of its own (default 2)")
    p.add_argument("--test", default="ib_write_bw", metavar="CMD",
                   help="a perftest name, iperf3, ping, or a shell command for the last guest ($PEER is the first, "
                        "$RDMA_DEVICE the RDMA function's device)")
    p.add_argument("--shell", action="store_true", help="boot, then leave the guests up with consoles to log in to")
    p.add_argument("--keep", action="store_true", help="leave everything running after the test")
    p.add_argument("--stop", action="store_true", help="end what --keep left running")
    p.add_argument("--console", metavar="VM", help="attach to the console of a kept guest (leave with Ctrl-])")
    p.add_argument("--image", metavar="FILE", help="your own cloud image as the guests' disk (never written to)")
    p.add_argument("--kernel", metavar="FILE", help="your own kernel (its virtio_net and rdma_rxe built in, or use --image)")
    p.add_argument("--initrd", metavar="FILE", help="the initial RAM disk that goes with --kernel; needs --image")
    p.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    p.add_argument("--memory", metavar="SIZE", help="memory of each guest (default 512M, with --gpudirect 1G)")
    p.add_argument("--cpus", type=int, default=1, metavar="N", help="virtual CPUs of each guest (default 1)")
    p.add_argument("--mtu", type=int, default=9000, metavar="N", help="MTU of the network (default 9000)")
    p.add_argument("--queue-pairs", type=int, default=1, metavar="N")
    p.add_argument("--face", choices=("vfio-user", "vhost-user"), default="vfio-user",
                   help="what QEMU sees of the virtio-net functions: a PCIe function, or virtqueues behind a virtio-net "
                        "device of its own (default vfio-user)")
    p.add_argument("--no-rdma-function", action="store_true",
                   help="leave the RDMA functions away: virtio-net and soft RoCE on it only")
    p.add_argument("--erdma", action="store_true",
                   help="RDMA functions with the face of Alibaba's erdma instead of mlx5's, beside the virtio-net function "
                        "of the same MAC address; takes the kernel of trixie-backports and builds the driver for it")
    p.add_argument("--rdma-link", choices=("ethernet", "infiniband"), default="ethernet",
                   help="what the port of an RDMA function is (default ethernet)")
    p.add_argument("--trapped-doorbells", dest="mapped_doorbells", action="store_false",
                   help="trap the guests' RDMA doorbells, instead of letting the EM poll memory that they write")
    p.add_argument("--gpudirect", action="store_true",
                   help="give each guest a memory function and move data between those; takes the kernel of "
                        "trixie-backports")
    p.add_argument("--gpu-memory", metavar="SIZE", help="size of a memory function (default 256M)")
    p.add_argument("--qemu-arg", action="append", default=[], metavar="ARG", help="an extra argument for QEMU")
    p.add_argument("--json", metavar="FILE", help="also write the results there")
    args = p.parse_args(argv)
    if not 1 <= args.guests <= 64:
        raise LabError(f"--guests {args.guests} is out of range; give 1 to 64")
    if args.guests < 2 and not args.shell:
        raise LabError("a test needs two guests; use --guests 2 or more, or --shell")
    if not 68 <= args.mtu <= 9000:
        raise LabError(f"--mtu {args.mtu} is out of range; give 68 to 9000")
    if not 1 <= args.queue_pairs <= 32:
        raise LabError(f"--queue-pairs {args.queue_pairs} is out of range; give 1 to 32")
    args.memory = args.memory or ("1G" if args.gpudirect else "512M")
    if args.erdma and (args.image or args.kernel or args.no_rdma_function or args.gpudirect):
        raise LabError("--erdma needs the lab's own guests and their RDMA functions, and its driver has no dma-buf; leave "
                       "--image, --kernel, --no-rdma-function and --gpudirect away")
    if args.gpudirect and (args.image or args.kernel or args.no_rdma_function):
        raise LabError("--gpudirect needs the lab's own guests and their RDMA functions; leave --image, --kernel and "
                       "--no-rdma-function away")
    if args.gpudirect and args.test != p.get_default("test"):
        raise LabError("--gpudirect is a test of its own; leave --test away, or use --shell")
    if args.gpu_memory and not args.gpudirect:
        raise LabError("--gpu-memory is the size of --gpudirect's memory functions; give both")
    args.gpu_mib = host.size_mib(args.gpu_memory or "256M") if args.gpudirect else None
    if args.gpu_mib and args.gpu_mib & (args.gpu_mib - 1):
        raise LabError(f"--gpu-memory {args.gpu_memory} is no power of two")
    check_arguments(args.qemu_arg)
    if args.initrd and not (args.image and args.kernel):
        raise LabError("--initrd goes with --kernel and --image; without --image the guests have their own")
    for name in ("image", "kernel", "initrd"):
        path = getattr(args, name)
        if path and not os.path.isfile(path):
            raise LabError(f"--{name} {path}: there is no such file")
    if args.image:
        image_format(args.image)
    if args.image and not args.shell and args.test != "ib_write_bw":
        host.say("the test runs inside your image: it must have the programs the test needs")
    return args


def rdma_kind(args):
    """What RDMA functions the guests get, as `Lab` has it."""
    return "erdma" if args.erdma else None if args.no_rdma_function else args.rdma_link


def bring_up_rdma(lab):
    """Names of the RDMA functions' devices in the guests; none without RDMA functions."""
    if lab.rdma_functions:
        host.say(f"loading {lab.rdma_functions[0].modules[-1]} in the guests")
    return lab.bring_up_rdma()


def compare(lab, test, rdma):
    """A perftest over soft RoCE and, when there are some, the RDMA functions, whose names `rdma` has."""
    server, kind = lab.vms[0], workloads.PERFTEST[test]
    sizes = (8,) if "atomic" in test else SIZES if kind == "bw" else SIZES[:3]
    figures = ("mib_per_s", "msg_per_s") if kind == "bw" else ("typical_us", "p99_us")
    units, scales = (("MiB/s", "k msg/s"), (1, 1e-3)) if kind == "bw" else (("typical µs", "99 % µs"), (1, 1))
    names = ["soft RoCE"] + (["RDMA function"] if rdma else [])
    header = ["pair", "bytes"] + ([f"{name} {unit}" for name in names for unit in units] if rdma else list(units))
    header += ["faster"] if rdma else []
    rows, results = [], []
    for index, vm in enumerate(lab.vms[1:], 1):
        for size in sizes:
            cells, first = [], []
            for name in names:
                host.say(f"{test}, {size} bytes, {vm.name} → vm0, {name}")
                device = "rxe0" if name == names[0] else (rdma[0], rdma[index])
                r = workloads.perftest(server, vm, lab.ip(0), test, size, device=device)
                results.append({"test": test, "device": name, "from": vm.name, "to": "vm0", "bytes": size, **r})
                cells += [r[figure] * scale for figure, scale in zip(figures, scales)]
                # Of few small messages perftest prints 0.00 MiB/s, but still how many there were.
                first.append(r[figures[1]] if kind == "bw" else r[figures[0]])
            if rdma:
                divisor, dividend = first if kind == "bw" else reversed(first)
                cells.append(f"{dividend / divisor:.1f} ×" if divisor else "-")
            rows.append([f"{vm.name} → vm0", size] + cells)
    return header, rows, results, 0


def run_test(lab, args):
    """Runs `--test`; returns `(header, rows, results, exit status)`."""
    server, client, rows, results = lab.vms[0], lab.vms[-1], [], []
    if args.gpudirect:
        args.test = "gpudirect"
        devices = bring_up_rdma(lab)
        host.say("gpudirect between the guests' memory functions")
        results = gpudirect.run(lab, devices)
        checked = sum(r["what"] == "data" for r in results)
        host.say(f"{checked} combinations of memory and size moved and compared; memory that was taken away was an error")
        return *gpudirect.rows(results), results, 0
    if args.test in workloads.PERFTEST:
        return compare(lab, args.test, bring_up_rdma(lab))
    if args.test in ("iperf3", "ping"):
        for index, vm in enumerate(lab.vms[1:], 1):
            host.say(f"{args.test}, {vm.name} → vm0")
            r = workloads.iperf3(server, vm, lab.ip(0)) if args.test == "iperf3" else workloads.ping(vm, lab.ip(0))
            results.append({"test": args.test, "from": vm.name, "to": "vm0", **r})
            rows += [[f"{vm.name} → vm0", key, value] for key, value in r.items()]
        return ["pair", "figure", "value"], rows, results, 0
    rdma = bring_up_rdma(lab)
    device = f" RDMA_DEVICE={rdma[-1]}" if rdma else ""
    host.say(f"in {client.name}: {args.test}")
    status, output = client.run(f"export PEER={lab.ip(0)}{device}; {args.test}", 3600)
    sys.stdout.write(output)
    return None, None, [{"test": args.test, "status": status, "output": output}], status


def attach(name):
    """Relays this terminal to a kept guest's console."""
    kept = load_kept()
    path = os.path.join(kept["run_dir"], f"{name}.con")
    if not os.path.exists(path):
        raise LabError(f"there is no guest `{name}`; kept guests: {', '.join(kept['guests'])}")
    if not sys.stdin.isatty():
        raise LabError("--console needs a terminal")
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        before = termios.tcgetattr(0)
        print(f"console of {name}; Ctrl-] leaves, Enter gives a prompt", flush=True)
        try:
            tty.setraw(0)
            while True:
                ready, _, _ = select.select([0, s], [], [])
                data = os.read(0, 4096) if 0 in ready else b""
                if b"\x1d" in data:
                    return
                s.sendall(data)
                if s in ready:
                    output = s.recv(4096)
                    if not output:
                        return
                    os.write(1, output)
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
            print()


def load_kept():
    """What `--keep` or `--shell` noted."""
    try:
        with open(KEPT) as f:
            return json.load(f)
    except (OSError, ValueError):
        raise LabError("nothing is running that --keep or --shell left")


def stop_kept():
    """Ends the processes that `--keep` noted, when they are still those; returns when they are gone."""
    kept = load_kept()
    left = [pid for pid, _ in kept["processes"] if is_kept(pid, kept)]
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        for pid in left:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [pid for pid in left if is_kept(pid, kept)]
    for name in os.listdir(kept["run_dir"]) if os.path.isdir(kept["run_dir"]) else []:
        path = os.path.join(kept["run_dir"], name)
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    host.say(f"stopped; logs are in {kept['run_dir']}")
    os.unlink(KEPT)


def is_kept(pid, kept):
    """Whether this process is there and belongs to the kept lab; a process that has ended has no command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return kept["run_dir"].encode() in f.read()
    except OSError:
        return False


def note_kept(lab):
    """Writes down what stays up, for --console and --stop."""
    write_json(KEPT, {"run_dir": lab.run_dir, "guests": [vm.name for vm in lab.vms],
                      "processes": [[vm.process.pid, vm.name] for vm in lab.vms] + [[lab.dpu.process.pid, "om"]]})


def wait_for_interrupt(lab):
    """Returns on Ctrl-C; fails when a guest ends before."""
    try:
        while True:
            time.sleep(1)
            for vm in lab.vms:
                vm.check()
    except KeyboardInterrupt:
        host.say("ending the guests")


def main_job(args):
    """Set-up, boot, test, result, end."""
    accel, why = host.pick_accel(args.accel)
    host.say(f"accelerator: {accel} ({why})")
    memory = host.size_mib(args.memory)
    host.check_memory(args.guests, memory + (args.gpu_mib or 0))
    begin = time.monotonic()
    qemu, boot = find_parts(args.kernel, "erdma" if args.erdma else "backports" if args.gpudirect else None)
    boots = None
    if args.image:
        def boots(run_dir):
            return [Boot(args.kernel, args.initrd, args.image, make_seed(run_dir, i, args.mtu),
                         f"root={root_device(args.image)} rw") for i in range(args.guests)]
    host.say(f"starting one OM, {args.guests} EMs and {args.guests} guests")
    with Lab(qemu, boot, args.guests, accel, memory, args.cpus, args.mtu, args.queue_pairs,
             extra=args.qemu_arg, keep=args.keep, boots=boots,
             rdma=rdma_kind(args),
             mapped_doorbells=args.mapped_doorbells, gpu_mib=args.gpu_mib, face=args.face) as lab:
        booted = time.monotonic()
        lab.wait_ready(600 if args.image else 180)
        host.say(f"guests up after {time.monotonic() - booted:.1f} s")
        if args.shell or args.keep:
            note_kept(lab)
        if args.shell:
            names = bring_up_rdma(lab)
            print(f"{args.guests} guests are up. In another terminal:")
            for vm, f in zip(lab.vms, lab.functions):
                print(f"  ./run-vm.sh --console {vm.name}     # {f.ip}")
            if names:
                print(f"RDMA functions: {', '.join(names)}, for example `ib_write_bw -d {names[0]}` in both guests")
            print("Ctrl-C here ends them." if not args.keep else "./run-vm.sh --stop ends them.", flush=True)
            if not args.keep:
                wait_for_interrupt(lab)
            return 0
        header, rows, results, status = run_test(lab, args)
        if header:
            print(f"\n{args.test} between stock guests over the DPU ({accel}, MTU {args.mtu})\n")
            print(table(header, rows))
        if args.json:
            write_json(args.json, {"accel": accel, "mtu": args.mtu, "guests": args.guests, "face": args.face,
                                   "rdma_function": rdma_kind(args),
                                   "mapped_doorbells": args.mapped_doorbells,
                                   "seconds": time.monotonic() - begin, "results": results})
        if args.keep:
            print("everything stays up: ./run-vm.sh --console vm0, ./run-vm.sh --stop")
        return status


def main(argv):
    """Entry; every failure is one sentence."""
    def end(signum, frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, end)
    try:
        args = arguments(argv)
        if args.stop:
            stop_kept()
            return 0
        if args.console:
            attach(args.console)
            return 0
        return main_job(args)
    except LabError as e:
        print(f"run-vm.sh: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if os.path.exists(KEPT) and not ("--keep" in argv or "--console" in argv or "--stop" in argv):
            forget_dead()


def forget_dead():
    """Removes the note when nothing of it runs any more."""
    try:
        kept = load_kept()
    except LabError:
        return
    if not any(os.path.exists(f"/proc/{pid}") for pid, _ in kept["processes"]):
        os.unlink(KEPT)
