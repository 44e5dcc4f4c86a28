"""EMs that are killed under guests which use them: the guests do not notice."""

import os
import re
import signal
import time

LAB = {"mtu": 1500, "rxe": False}
KILLS = int(os.environ.get("DISTDPU_VM_KILLS", "6"))


def status(ctx, em):
    """What `dpuctl status` says of an EM."""
    return next(e for e in ctx.lab.dpu.ctl("status")["ems"] if e["name"] == em)


def replace(ctx, em, sig=signal.SIGKILL):
    """Ends an EM by a signal and waits for the next."""
    old = status(ctx, em)["pid"]
    os.kill(old, sig)
    deadline = time.monotonic() + 15
    while True:
        now = status(ctx, em)
        if now["state"] == "up" and now["pid"] != old:
            return
        assert time.monotonic() < deadline, now
        time.sleep(0.05)


def complaints(vm):
    """What the guest's kernel has to say about its network."""
    return vm.must("dmesg -r | grep -E '^<[0-4]>' | grep -iE 'virtio|eth0|vfio|pci|hung|stall' || true").strip()


def start_stream(ctx, seconds, address):
    """iperf3 from vm1 to an address of vm0."""
    server, client = ctx.lab.vms
    server.must("pkill -x iperf3; iperf3 -s -D --logfile /tmp/iperf3.log; sleep 0.3")
    client.must(f"(iperf3 -c {address} -t {seconds} -i 1 >/tmp/iperf.log 2>&1; echo status $? >>/tmp/iperf.log) "
                ">/dev/null 2>&1 & sleep 1", 30)


def end_of_stream(ctx, seconds):
    """Waits for iperf3, which ended well; prints what it received."""
    client = ctx.lab.vms[1]
    deadline = time.monotonic() + seconds + 60
    while "status" not in client.must("cat /tmp/iperf.log", 30):
        assert time.monotonic() < deadline, "iperf3 does not end"
        time.sleep(1)
    log = client.must("cat /tmp/iperf.log", 30)
    assert "status 0" in log, log[-2000:]
    print("   " + "; ".join(line for line in log.splitlines() if "receiver" in line), flush=True)


def start_streams(ctx, seconds):
    """iperf3 from vm1 to vm0, and a ping 100 times a second."""
    start_stream(ctx, seconds, ctx.lab.ip(0))
    ctx.lab.vms[1].must(f"(ping -D -i 0.01 -w {seconds} {ctx.lab.ip(0)} >/tmp/ping.log 2>&1) >/dev/null 2>&1 &", 30)


def gaps(client, kills):
    """The longest pauses between two answers to the ping, in ms, as many as there were kills."""
    times = [float(t) for t in re.findall(r"\[(\d+\.\d+)\] \d+ bytes", client.must("cat /tmp/ping.log", 60))]
    assert len(times) >= 20, f"only {len(times)} answers"
    return sorted((1000 * (b - a) for a, b in zip(times, times[1:])), reverse=True)[:kills]


def check_streams(ctx, seconds, kills):
    """The stream ended well, the guests are silent; prints the gaps."""
    end_of_stream(ctx, seconds)
    print("   longest gaps, ms:", " ".join(f"{g:.0f}" for g in gaps(ctx.lab.vms[1], kills)), flush=True)
    for index, vm in enumerate(ctx.lab.vms):
        said = complaints(vm)
        assert said == ctx.before[index], f"vm{index}: {said}"


def losses(ctx):
    """How often each guest lost its carrier since it booted."""
    return [vm.must("cat /sys/class/net/eth0/carrier_down_count").strip() for vm in ctx.lab.vms]


def remember(ctx):
    """Notes what the kernels said before."""
    ctx.before, ctx.losses = [complaints(vm) for vm in ctx.lab.vms], losses(ctx)


def test_em_killed_under_traffic(ctx):
    """kill -9 of either EM, again and again: the connection stays, nothing is logged, links stay up."""
    remember(ctx)
    seconds = 8 + 4 * KILLS
    start_streams(ctx, seconds)
    for n in range(KILLS):
        time.sleep(1.5 + 0.37 * (n % 3))
        replace(ctx, ctx.lab.functions[n % 2].em)
    check_streams(ctx, seconds, KILLS)
    assert losses(ctx) == ctx.losses


def test_em_killed_while_guests_change_their_interface(ctx):
    """Address filters, VLANs, a driver that binds anew: what was set holds after the kill."""
    remember(ctx)
    vm = ctx.lab.vms[0]
    vm.must("ip link set eth0 promisc on; ip link set eth0 promisc off; "
            "ip link add link eth0 name eth0.9 type vlan id 9 && ip addr add 10.9.0.1/24 dev eth0.9 && ip link set eth0.9 up")
    ctx.lab.vms[1].must("ip link add link eth0 name eth0.9 type vlan id 9 && ip addr add 10.9.0.2/24 dev eth0.9 "
                        "&& ip link set eth0.9 up")
    replace(ctx, ctx.lab.functions[0].em)
    vm.must("ping -c 5 -i 0.2 -W 2 10.9.0.2 >/dev/null", 30)
    vm.must("d=$(basename $(readlink /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net; "
            "echo $d > unbind; sleep 0.1; echo $d > bind", 30)
    replace(ctx, ctx.lab.functions[0].em)
    vm.must(f"ip addr add {ctx.lab.ip(0)}/24 dev eth0; ip link set eth0 up; ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)


def test_em_killed_and_guest_reboots(ctx):
    """A guest whose EM was replaced reboots as any other."""
    replace(ctx, ctx.lab.functions[0].em)
    ctx.lab.vms[0].qmp("system_reset")
    time.sleep(1)
    ctx.lab.vms[0].wait_ready(90)
    ctx.lab.vms[0].must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)


def test_em_stopped_for_a_second(ctx):
    """SIGSTOP for 1 s is no death: nothing breaks, nobody is replaced."""
    remember(ctx)
    start_streams(ctx, 8)
    em = ctx.lab.functions[0].em
    pid = status(ctx, em)["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    check_streams(ctx, 8, 1)
    assert status(ctx, em)["pid"] == pid


def test_om_killed_under_traffic(ctx):
    """kill -9 of the OM: the guests' traffic goes on; a new OM adopts the EMs as they are."""
    remember(ctx)
    start_streams(ctx, 14)
    pids = ctx.lab.dpu.em_pids()
    for _ in range(2):
        ctx.lab.dpu.process.kill()
        ctx.lab.dpu.process.wait()
        time.sleep(1)
        begin = time.monotonic()
        ctx.lab.dpu.start()
        print(f"   adopted {time.monotonic() - begin:.2f} s after the start", flush=True)
        assert ctx.lab.dpu.em_pids() == pids
        time.sleep(1)
    check_streams(ctx, 14, 2)
    # What was kept is with the new OM.
    replace(ctx, ctx.lab.functions[0].em)
    ctx.lab.vms[0].must(f"ping -c 5 -i 0.2 -W 2 {ctx.lab.ip(1)} >/dev/null", 30)
    assert losses(ctx) == ctx.losses
