"""Drivers, guests and VMMs that come and go, while the other guest lives on."""

import time

from lab import workloads

LAB = {"mtu": 1500, "rxe": False}


def start_traffic(ctx):
    """TCP from vm1 to vm0 in the background."""
    server, client = ctx.lab.vms
    server.must("pkill -x iperf3; iperf3 -s -D --logfile /tmp/iperf3.log; sleep 0.2")
    client.must(f"(iperf3 -c {ctx.lab.ip(0)} -t 60 >/tmp/client.log 2>&1 &); sleep 0.5")


def wait_for_ping(ctx, source, target, seconds=30):
    """Returns when `source` reaches `target` again."""
    deadline = time.monotonic() + seconds
    while ctx.lab.vms[source].run(f"ping -c 1 -W 1 {ctx.lab.ip(target)} >/dev/null", 20)[0] != 0:
        assert time.monotonic() < deadline, f"vm{source} does not reach vm{target} after {seconds} s"


def test_driver_unbind_and_rebind(ctx):
    """Ten times under traffic; the interface works each time."""
    start_traffic(ctx)
    vm = ctx.lab.vms[0]
    for _ in range(10):
        vm.must("d=$(basename $(readlink /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net; "
                "echo $d > unbind; sleep 0.1; echo $d > bind", 30)
    vm.must(f"ip addr add {ctx.lab.ip(0)}/24 dev eth0; ip link set eth0 up")
    wait_for_ping(ctx, 1, 0)
    ctx.lab.vms[1].run("pkill -x iperf3")


def test_guest_reboot_under_traffic(ctx):
    """The guest reboots twice; the EM, the OM and the other guest stay, and traffic flows again."""
    pids = ctx.lab.dpu.em_pids()
    for _ in range(2):
        start_traffic(ctx)
        ctx.lab.vms[0].qmp("system_reset")
        time.sleep(1)
        ctx.lab.vms[0].wait_ready(90)
        wait_for_ping(ctx, 0, 1)
        ctx.lab.vms[1].run("pkill -x iperf3")
    assert ctx.lab.dpu.em_pids() == pids


def test_guest_killed_and_started_again(ctx):
    """kill -9 of one QEMU under traffic; a new one takes its function, the other guest never stopped."""
    pids = ctx.lab.dpu.em_pids()
    start_traffic(ctx)
    boot_id = ctx.lab.vms[1].must("cat /proc/sys/kernel/random/boot_id")
    ctx.lab.vms[0].kill()
    ctx.lab.replace_vm(0).start().wait_ready(90)
    wait_for_ping(ctx, 1, 0)
    assert ctx.lab.vms[1].must("cat /proc/sys/kernel/random/boot_id") == boot_id
    assert ctx.lab.dpu.em_pids() == pids
    r = workloads.iperf3(*ctx.lab.vms, ctx.lab.ip(0), 2)
    assert r["mbit_per_s"] > 50, r


def test_link_follows_the_peer(ctx):
    """The link goes down when the peer's EM does not live, and up when one does."""
    import os
    import signal
    vm = ctx.lab.vms[1]

    def losses():
        return int(vm.must("cat /sys/class/net/eth0/carrier_down_count"))

    def wait(what, happened):
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline, f"{what} not after 60 s"
            time.sleep(0.05)

    def kill():
        """As soon as one is there it is ended; the pauses before the next grow."""
        pid = ctx.lab.dpu.em_pids().get(ctx.lab.functions[0].em)
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    up = lambda: vm.must("cat /sys/class/net/eth0/carrier").strip() == "1"  # noqa: E731
    wait("carrier", up)
    before = losses()

    def down():
        until = time.monotonic() + 3
        while time.monotonic() < until:
            kill()
            time.sleep(0.02)
        return losses() > before
    wait("the loss of the carrier", down)
    wait("the carrier's return", up)
    wait_for_ping(ctx, 1, 0)


def test_admin_link_down_and_up(ctx):
    """`dpuctl link set` reaches the guest as carrier."""
    vm, name = ctx.lab.vms[1], ctx.lab.functions[1].name
    for state, want in (("down", "0"), ("up", "1")):
        ctx.lab.dpu.ctl("link", "set", name, state)
        deadline = time.monotonic() + 10
        while vm.must("cat /sys/class/net/eth0/carrier").strip() != want:
            assert time.monotonic() < deadline, f"carrier is not {want} after link set {state}"
            time.sleep(0.1)
