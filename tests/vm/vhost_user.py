"""QEMU's own virtio-net with a function of the DPU behind it over vhost-user, opposite a guest with a PCIe function."""

import os
import re
import time

from lab import workloads
from recovery import complaints, end_of_stream, gaps, replace, start_streams

LAB = {"mtu": 9000, "queue_pairs": 2, "cpus": 2, "rxe": False, "face": ["vhost-user", "vfio-user"]}
KILLS = 4


def queues(ctx):
    """Packets by queue of the function with the front end."""
    stats = next(f for f in ctx.lab.dpu.ctl("stats")["functions"] if f["name"] == ctx.lab.functions[0].name)
    return {q["name"]: q["packets"] for q in stats["queues"]}


def test_guest_finds_the_device(ctx):
    """virtio_net binds, with MAC, MTU and link; dpuctl names the face and says that the function runs."""
    vm, f = ctx.lab.vms[0], ctx.lab.functions[0]
    assert vm.must("cat /sys/class/net/eth0/address").strip() == f.mac
    assert vm.must("cat /sys/class/net/eth0/mtu").strip() == "9000"
    assert "driver: virtio_net" in vm.must("ethtool -i eth0")
    said = ctx.lab.dpu.function(f.name)
    assert (said["face"], said["state"]) == ("vhost-user", "running"), said
    assert not complaints(vm), complaints(vm)


def test_ping(ctx):
    """No packet is lost, small and jumbo, in either direction."""
    for vm, peer in ((1, 0), (0, 1)):
        for size in (56, 8972):
            r = workloads.ping(ctx.lab.vms[vm], ctx.lab.ip(peer), 300, size)
            assert r["lost"] == 0, (vm, size, r)


def test_tcp_both_ways(ctx):
    """iperf3 in each direction."""
    server, client = ctx.lab.vms
    for options in ("", "-R"):
        r = workloads.iperf3(server, client, ctx.lab.ip(0), 2, options)
        print(f"   {options or 'to the front end'}: {r['mbit_per_s']:.0f} Mbit/s", flush=True)
        assert r["mbit_per_s"] > 50, (options, r)


def test_multiqueue(ctx):
    """Both pairs are in use with parallel streams, one after `combined 1`, and both again."""
    server, client = ctx.lab.vms
    vm = ctx.lab.vms[0]
    for pairs in (2, 1, 2):
        vm.must(f"ethtool -L eth0 combined {pairs}")
        before = queues(ctx)
        workloads.iperf3(server, client, ctx.lab.ip(0), 2, "-P 8")
        moved = {name: count - before[name] for name, count in queues(ctx).items()}
        assert moved["rx0"] > 0 and (moved["rx1"] > 0) == (pairs == 2), (pairs, moved)


def test_driver_binds_anew(ctx):
    """Unbind and bind, again and again."""
    vm = ctx.lab.vms[0]
    for _ in range(5):
        vm.must("d=$(basename $(readlink /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net; "
                "echo $d > unbind; sleep 0.1; echo $d > bind", 30)
        vm.must(f"ip link set eth0 mtu 9000 up; ip addr add {ctx.lab.ip(0)}/24 dev eth0", 30)
        vm.must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)


def test_em_killed_under_traffic(ctx):
    """kill -9 of the EM behind the front end: QEMU connects again, the stream goes on."""
    before = [complaints(vm) for vm in ctx.lab.vms]
    seconds = 6 + 4 * KILLS
    start_streams(ctx, seconds)
    for n in range(KILLS):
        time.sleep(2 + 0.37 * (n % 3))
        replace(ctx, ctx.lab.functions[0].em)
    end_of_stream(ctx, seconds)
    print("   longest gaps, ms:", " ".join(f"{g:.0f}" for g in gaps(ctx.lab.vms[1], KILLS)), flush=True)
    for vm, said in zip(ctx.lab.vms, before):
        # QEMU tells the guest that the link went and came.
        now = re.sub(r".*(link becomes ready|Link is).*\n?", "", complaints(vm))
        assert now == said, now


def test_paused_and_reset(ctx):
    """The VM stops and goes on, then reboots."""
    vm = ctx.lab.vms[0]
    for _ in range(3):
        vm.qmp("stop")
        time.sleep(0.3)
        vm.qmp("cont")
        vm.must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)
    vm.qmp("system_reset")
    time.sleep(1)
    vm.wait_ready(120)
    vm.must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)


def test_front_end_is_killed_and_another_comes(ctx):
    """kill -9 of QEMU; the next one finds the function as new."""
    ctx.lab.vms[0].kill()
    vm = ctx.lab.replace_vm(0)
    vm.start()
    vm.wait_ready(120)
    vm.must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)


def test_state_moves_to_another_qemu_under_traffic(ctx):
    """A migration of the running guest into a file, and out of it in another QEMU: the guest goes on, its memory whole."""
    ctx.fresh()
    lab = ctx.lab
    vm, peer = lab.vms
    vm.must("head -c 20000000 /dev/urandom >/tmp/data; cd /tmp; md5sum data >sum", 60)
    vm.must(f"(ping -i 0.05 {lab.ip(1)} >/tmp/ping.log 2>&1) >/dev/null 2>&1 &", 30)
    peer.must(f"(ping -f -s 1400 {lab.ip(0)} >/dev/null 2>&1) >/dev/null 2>&1 &", 30)
    path = os.path.join(lab.run_dir, "state")
    vm.qmp("migrate", uri=f"exec:cat >{path}")
    deadline = time.monotonic() + 120
    while (state := vm.qmp("query-migrate").get("status")) != "completed":
        assert state in ("setup", "active", "device") and time.monotonic() < deadline, state
        time.sleep(0.2)
    vm.stop()
    following = lab.replace_vm(0)
    following.argv += ["-incoming", f"exec:cat {path}"]
    following.start()
    following.wait_ready(120)
    following.must("cd /tmp; md5sum -c sum", 60)
    before = int(following.must("wc -l </tmp/ping.log"))
    time.sleep(2)
    assert int(following.must("wc -l </tmp/ping.log")) > before + 5, "the guest's ping does not go on"
    following.must(f"ping -c 20 -i 0.1 -W 2 {lab.ip(1)} >/dev/null", 30)
    said = complaints(following)
    assert not said, said
