"""What people run over RDMA, over the RDMA function: qperf, UCX, Open MPI."""

import os
import re
import subprocess

from lab.host import ROOT
from rdma_function import clean

MAKE = os.path.join(ROOT, "tests", "vm", "make-workloads.sh")


def LAB():
    """The lab's settings. The disk with the programs is made on first use, then cached."""
    disk = subprocess.run([MAKE], stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()[-1]
    drive = f"file={disk}/workloads.img,if=none,id=programs,format=raw,readonly=on"
    return {"mtu": 9000, "rdma": "ethernet", "memory": 1024,
            "extra": ("-drive", drive, "-device", "virtio-blk-pci,drive=programs,addr=0x10")}


# What UCX needs for that it makes through DEVX, which the device does not have.
NO_REMOTE_FLUSH = re.compile(r"flush\(remote\) is not supported|error during flush: Unsupported operation")

MOUNT = """
set -e
[ ! -d /programs/usr ] || exit 0
mkdir -p /programs
modprobe -a virtio_blk ext4
for i in $(seq 50); do [ -b /dev/vda ] && break; sleep 0.1; done
mount -t ext4 -o ro /dev/vda /programs
mount --rbind /dev /programs/dev; mount -t proc proc /programs/proc; mount --rbind /sys /programs/sys
for d in tmp run var root; do
  mkdir -p /overlay/$d
  cp -a /programs/$d/. /overlay/$d/
  mount --bind /overlay/$d /programs/$d
done
mkdir -p /overlay/run/sshd
"""


def programs(ctx):
    """Both guests with the disk mounted and the RDMA functions up; the names of the devices."""
    names = ctx.lab.bring_up_rdma()
    for vm in ctx.lab.vms:
        vm.must(MOUNT, 60)
    return names


def inside(command):
    """A command in the root file system of the disk."""
    quoted = command.replace("'", "'\\''")
    return f"chroot /programs /bin/sh -c '{quoted}'"


def between(ctx, server_command, client_command, timeout=120):
    """A server in vm0 and a client in vm1; what the client printed."""
    server, client = ctx.lab.vms
    running = server.guest.spawn(inside(f"timeout {timeout} {server_command} 2>&1"))
    try:
        client.must("sleep 2")
        status, text = client.run(inside(f"timeout {timeout} {client_command} 2>&1"), timeout + 20)
    finally:
        server.guest.kill(running)
    _, said = server.guest.wait(running, 30)
    assert status == 0, (client_command, status, text[-600:], said[-600:])
    return text


def test_qperf(ctx):
    """qperf measures RC bandwidth and latency. By rdma_cm: without it, it knows LIDs only."""
    programs(ctx)
    for test in ("rc_bw", "rc_rdma_write_bw", "rc_rdma_read_bw", "rc_lat", "rc_rdma_write_lat"):
        text = between(ctx, "qperf", f"qperf -t 2 -cm 1 {ctx.lab.rdma_functions[0].ip} {test}")
        figure = re.search(r"(bw|latency)\s*=\s*([\d.]+)", text)
        assert figure and float(figure[2]) > 0, (test, text)
    clean(ctx)


def test_ucx_perftest(ctx):
    """ucx_perftest: tagged and active messages over UCX's verbs and mlx5 transports; put, get and atomics over the latter."""
    names = programs(ctx)
    for transport in ("rc_v", "rc_x", "ud_v"):
        for test, size in (("tag_bw", 65536), ("tag_lat", 8), ("ucp_am_bw", 4096), ("ucp_put_bw", 65536), ("ucp_get", 65536), ("ucp_fadd", 8)):
            # UCX itself does one-sided operations over rc_x only.
            if transport != "rc_x" and not test.startswith(("tag", "ucp_am")):
                continue
            count = 200
            common = f"-P 0 -s {size} -n {count} -w 10"
            environment = "UCX_TLS={}{} UCX_NET_DEVICES={}:1 UCX_LOG_LEVEL=warn"
            server, client = (environment.format(transport, ",self", name) for name in names)
            text = between(ctx, f"env {server} ucx_perftest {common} -t {test}",
                           f"env {client} ucx_perftest {ctx.lab.ip(0)} {common} -t {test}")
            assert "Final:" in text, (transport, test, text[-600:])
            bad = [line for line in text.splitlines() if re.search("ERROR|WARN", line) and not NO_REMOTE_FLUSH.search(line)]
            assert not bad, (transport, test, bad[:5])
    clean(ctx)


ALLREDUCE = """
from mpi4py import MPI
import numpy as np
world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
for count in (1, 1000, 100003, 1 << 20):
    own = (np.arange(count, dtype=np.float64) * (rank + 1)) % 8191
    total = np.empty_like(own)
    world.Allreduce(own, total, op=MPI.SUM)
    expected = sum((np.arange(count, dtype=np.float64) * (r + 1)) % 8191 for r in range(size))
    assert (total == expected).all(), count
    print("rank", rank, "of", size, count, "right", flush=True)
"""


def test_mpi_allreduce_over_ucx(ctx):
    """Open MPI over UCX's RC transport adds arrays up to 8 MiB, and every element is right."""
    names = programs(ctx)
    assert names[0] == names[1], names
    for vm in ctx.lab.vms:
        vm.must("pgrep -x sshd >/dev/null || " + inside("/usr/sbin/sshd"))
        vm.must(f"cat >/programs/root/allreduce.py <<'PYTHON'\n{ALLREDUCE}\nPYTHON")
    hosts = f"{ctx.lab.ip(1)}:1,{ctx.lab.ip(0)}:1"
    run = ("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 HOME=/root mpirun -np 2 "
           f"--host {hosts} --map-by node:OVERSUBSCRIBE --mca pml ucx --mca osc ucx --mca coll ^hcoll "
           f"-x UCX_TLS=rc,self -x UCX_NET_DEVICES={names[0]}:1 -x UCX_LOG_LEVEL=warn python3 /root/allreduce.py")
    text = ctx.lab.vms[1].must(inside(f"timeout 400 {run} 2>&1"), 420)
    for rank in (0, 1):
        assert text.count(f"rank {rank} of 2") == 4, text[-800:]
    clean(ctx)
