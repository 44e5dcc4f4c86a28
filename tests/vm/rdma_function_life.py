"""RDMA functions whose drivers, guests and VMMs come and go, while the peer has queue pairs to them."""

import re
import time

from lab import rdma, workloads

LAB = {"mtu": 9000, "rdma": "infiniband", "mapped_doorbells": False}
# IBTA 1.5 §9.9.3, `enum ibv_wc_status`: transport retry exceeded; perftest prints the number.
RETRY_EXCEEDED = 12


def clean(vm):
    """Fails when the guest's kernel complained."""
    found = rdma.complaints(vm)
    assert not found, f"{vm.name}: " + "; ".join(found[:5])


def works(ctx):
    """A short transfer from vm1 to vm0, and quiet kernels."""
    names = ctx.lab.bring_up_rdma()
    r = workloads.perftest(*ctx.lab.vms, ctx.lab.ip(0), "ib_write_bw", 65536, device=names)
    assert r["mib_per_s"] > 0, r
    for vm in ctx.lab.vms:
        clean(vm)


def start_traffic(ctx):
    """Writes from vm1 to vm0 for longer than any test waits; the id of the command in vm1."""
    own, other = ctx.lab.bring_up_rdma()
    server, client = ctx.lab.vms
    options = "-F -s 65536 -D 90"
    server.must(f"pkill -x ib_write_bw; (ib_write_bw -d {own} {options} >/tmp/server.log 2>&1 &); sleep 0.5")
    ident = client.guest.spawn(f"stdbuf -oL ib_write_bw -d {other} {options} {ctx.lab.ip(0)} 2>&1")
    deadline = time.monotonic() + 30
    while True:
        status, text = client.guest.wait(ident, 1)
        assert status == 124, (status, text[-600:])
        if "#bytes" in text:  # the head of the result: both ends are connected
            break
        assert time.monotonic() < deadline, text[-600:]
    time.sleep(2)
    return ident


def expect_retry_exceeded(ctx, ident):
    """The client in vm1 ends by itself, with the error that a dead peer gives."""
    status, text = ctx.lab.vms[1].guest.wait(ident, 60)
    assert status not in (0, 124), (status, text[-600:])
    found = re.search(r"Failed status (\d+)", text)
    assert found and int(found[1]) == RETRY_EXCEEDED, (status, text[-600:])
    clean(ctx.lab.vms[1])


def reload_driver(ctx, times):
    """modprobe -r and modprobe again and again: the device is there each time, and the log stays clean."""
    vm = ctx.lab.vms[0]
    ctx.lab.bring_up_rdma()
    for _ in range(times):
        vm.must("modprobe -r mlx5_ib && modprobe -r mlx5_core", 60)
        assert not rdma.devices(vm)
        rdma.bring_up(vm, ctx.lab.rdma_functions[0])
    clean(vm)
    works(ctx)


def test_driver_unloads_and_loads(ctx):
    """Twice modprobe -r and modprobe."""
    reload_driver(ctx, 2)


def test_guest_reboots_under_traffic(ctx):
    """system_reset of the server's guest: the peer's writes end with retry exceeded; the EMs and the OM stay."""
    pids = ctx.lab.dpu.em_pids()
    ident = start_traffic(ctx)
    ctx.lab.vms[0].qmp("system_reset")
    expect_retry_exceeded(ctx, ident)
    ctx.lab.vms[0].wait_ready(90)
    works(ctx)
    assert ctx.lab.dpu.em_pids() == pids


def test_guest_killed_under_traffic(ctx):
    """kill -9 of the server's QEMU: the peer's writes end with retry exceeded; a new guest takes the function."""
    pids = ctx.lab.dpu.em_pids()
    ident = start_traffic(ctx)
    ctx.lab.vms[0].kill()
    expect_retry_exceeded(ctx, ident)
    told = ctx.lab.dpu.function(ctx.lab.rdma_functions[0].name)
    assert told["state"] == "waiting" and told["rdma"]["shared_files"] == 0, told
    ctx.lab.replace_vm(0).start().wait_ready(90)
    works(ctx)
    assert ctx.lab.dpu.em_pids() == pids
