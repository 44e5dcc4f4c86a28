"""Two stock guests on the DPU's network: what virtio_net users do."""

from lab import workloads

LAB = {"mtu": 9000, "queue_pairs": 2, "cpus": 2}


def test_guest_finds_the_function(ctx):
    """virtio_net binds, with MAC, speed, MTU and link as configured."""
    vm, f = ctx.lab.vms[0], ctx.lab.functions[0]
    assert vm.must("cat /sys/class/net/eth0/address").strip() == f.mac
    assert vm.must("cat /sys/class/net/eth0/carrier").strip() == "1"
    assert vm.must("cat /sys/class/net/eth0/mtu").strip() == "9000"
    assert "driver: virtio_net" in vm.must("ethtool -i eth0")
    assert "25000Mb/s" in vm.must("ethtool eth0")
    assert "1af4:1041" in vm.must("lspci -n")
    problems = vm.must("dmesg -r | grep -E '^<[0-3]>' | grep -iE 'virtio|eth0' || true")
    assert not problems.strip(), problems


def test_ping(ctx):
    """No packet is lost, small and jumbo."""
    for size in (56, 8972):
        r = workloads.ping(ctx.lab.vms[1], ctx.lab.ip(0), 500, size)
        assert r["lost"] == 0, (size, r)


def test_tcp_both_ways_at_both_mtus(ctx):
    """iperf3 in each direction at MTU 9000 and 1500."""
    server, client = ctx.lab.vms
    for mtu in (1500, 9000):
        for vm in ctx.lab.vms:
            vm.must(f"ip link set eth0 mtu {mtu}")
        for options in ("", "-R"):
            r = workloads.iperf3(server, client, ctx.lab.ip(0), 2, options)
            assert r["mbit_per_s"] > 50, (mtu, options, r)


def test_offload_toggles(ctx):
    """With checksum and segmentation offload in every state the same bytes arrive, in both directions."""
    for vm in ctx.lab.vms:
        vm.must("head -c 3000000 /dev/urandom > /tmp/data")
    for toggle in ("tx off", "tx on tso off", "tso on gso off", "gso on gro off", "tx on tso on gso on gro on"):
        for vm in ctx.lab.vms:
            vm.must(f"ethtool -K eth0 {toggle}")
        for sender, receiver in ((0, 1), (1, 0)):
            send, receive = ctx.lab.vms[sender], ctx.lab.vms[receiver]
            # Its input stays open: nc ends with its input, not only with its peer.
            receive.must("pkill -x sleep; rm -f /tmp/got /tmp/end; (sleep 60 | "
                         "(timeout 60 nc -l -p 7000 > /tmp/got; touch /tmp/end)) >/dev/null 2>&1 & sleep 0.3")
            send.must(f"timeout 60 nc {ctx.lab.ip(receiver)} 7000 < /tmp/data", 70)
            want = send.must("sha256sum < /tmp/data")
            got = receive.must("for i in $(seq 100); do [ -e /tmp/end ] && break; sleep 0.1; done; "
                               "sha256sum < /tmp/got", 30)
            assert got == want, f"{toggle}, vm{sender} to vm{receiver}"


def test_multiqueue(ctx):
    """Both pairs are in use with parallel streams, and one pair works again after `combined 1`."""
    server, client = ctx.lab.vms
    for vm in ctx.lab.vms:
        vm.must("ethtool -L eth0 combined 2")
    workloads.iperf3(server, client, ctx.lab.ip(0), 2, "-P 8")
    queues = next(f for f in ctx.lab.dpu.ctl("stats")["functions"] if f["name"] == ctx.lab.functions[0].name)["queues"]
    moved = {q["name"]: q["packets"] for q in queues}
    assert moved["rx0"] > 0 and moved["rx1"] > 0, moved
    for vm in ctx.lab.vms:
        vm.must("ethtool -L eth0 combined 1")
    assert workloads.iperf3(server, client, ctx.lab.ip(0), 1)["mbit_per_s"] > 50


def test_vlan_and_promiscuous(ctx):
    """Tagged traffic passes between the guests' VLAN interfaces."""
    for index, vm in enumerate(ctx.lab.vms):
        vm.must("ip link add link eth0 name eth0.7 type vlan id 7 && "
                f"ip addr add 10.7.0.{index + 1}/24 dev eth0.7 && ip link set eth0.7 up && ip link set eth0 promisc on")
    assert workloads.ping(ctx.lab.vms[1], "10.7.0.1", 50)["lost"] == 0
    for vm in ctx.lab.vms:
        vm.must("ip link set eth0 promisc off && ip link del eth0.7")


def test_counters_agree_with_the_guest(ctx):
    """dpuctl's count of received frames grows by what the guest received."""
    def counts():
        guest = int(ctx.lab.vms[0].must("cat /sys/class/net/eth0/statistics/rx_packets"))
        stats = next(f for f in ctx.lab.dpu.ctl("stats")["functions"] if f["name"] == ctx.lab.functions[0].name)
        return guest, sum(q["packets"] for q in stats["queues"] if q["name"].startswith("rx"))
    before = counts()
    workloads.ping(ctx.lab.vms[1], ctx.lab.ip(0), 200)
    after = counts()
    assert after[0] - before[0] == after[1] - before[1] >= 200, (before, after)


def test_idle_em_sleeps(ctx):
    """An EM whose guests are quiet uses at most 1 % of a core over 5 s."""
    import os
    import time

    def ticks(pid):
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    pids = ctx.lab.dpu.em_pids()
    time.sleep(1)
    before = {em: ticks(pid) for em, pid in pids.items()}
    time.sleep(5)
    per_second = os.sysconf("SC_CLK_TCK")
    for em, pid in pids.items():
        share = (ticks(pid) - before[em]) / per_second / 5
        assert share <= 0.01, f"{em} used {share:.1%} of a core while idle"
