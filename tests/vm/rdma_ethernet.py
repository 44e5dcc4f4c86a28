"""RDMA functions with Ethernet ports under the stock mlx5 driver: the network interface, RoCE v2, rdma_cm."""

import time

import network
from lab import workloads
from rdma_function import clean

LAB = {"mtu": 9000, "rdma": "ethernet", "cpus": 2}


def devices(ctx):
    """Names of the devices in both guests, with the driver loaded and the interfaces up."""
    return ctx.lab.bring_up_rdma()


def interface(vm, name):
    """The network interface of a device."""
    return vm.must(f"ls /sys/class/infiniband/{name}/device/net").split()[0]


def gid_index(vm, device):
    """Index of the RoCE v2 GID that is an IPv4 address."""
    ports = f"/sys/class/infiniband/{device}/ports/1"
    found = vm.must(f"for i in $(seq 0 15); do grep -q 'RoCE v2' {ports}/gid_attrs/types/$i 2>/dev/null && "
                    f"grep -q ':ffff:0a01:' {ports}/gids/$i && echo $i; done; true").split()
    assert len(found) == 1, found
    return found[0]


def perftest(ctx, name, size, options="", address=None):
    """One perftest from vm1 to vm0 over the functions."""
    server, client = ctx.lab.vms
    r = workloads.perftest(server, client, address or ctx.lab.ip(0), name, size, options, devices(ctx), 200)
    assert all(value > 0 for value in r.values()), (name, size, options, r)


def test_interface_and_port_come_up(ctx):
    """mlx5e makes an interface with the MAC of the function, and the port is active with RoCE v2 GIDs."""
    for vm, f, device in zip(ctx.lab.vms, ctx.lab.rdma_functions, devices(ctx)):
        name = interface(vm, device)
        assert vm.must(f"cat /sys/class/net/{name}/address").strip() == f.mac
        assert vm.must(f"cat /sys/class/net/{name}/carrier").strip() == "1"
        assert "driver: mlx5_core" in vm.must(f"ethtool -i {name}")
        assert "Link detected: yes" in vm.must(f"ethtool {name}")
        info = vm.must(f"ibv_devinfo -v -d {device}")
        assert "PORT_ACTIVE" in info and "link_layer:\t\tEthernet" in info, info
        gid_index(vm, device)
    clean(ctx)


def test_each_interface_answers_for_its_own_address(ctx):
    """The two functions of a guest share a segment, and yet no address is found behind the other's MAC."""
    names = devices(ctx)
    for here, there in ((0, 1), (1, 0)):
        vm, peer = ctx.lab.vms[here], ctx.lab.functions[there]
        own, other = "eth0", interface(vm, names[here])
        for device, address, mac in ((own, peer.ip, peer.mac),
                                     (other, ctx.lab.rdma_functions[there].ip, ctx.lab.rdma_functions[there].mac)):
            for _ in range(5):
                found = vm.must(f"ip neigh flush dev {device}; ping -q -c 1 -W 5 {address} >/dev/null; "
                                f"ip neigh show {address} dev {device}")
                assert mac in found, (vm.name, device, address, found)


def test_ping_both_ways(ctx):
    """No packet is lost between the interfaces, small and jumbo, IPv4 and IPv6."""
    names = devices(ctx)
    for sender, receiver in ((1, 0), (0, 1)):
        vm, peer = ctx.lab.vms[sender], ctx.lab.rdma_functions[receiver]
        for size in (56, 8972):
            r = workloads.ping(vm, peer.ip, 200, size)
            assert r["lost"] == 0, (sender, size, r)
        octets = [int(octet, 16) for octet in peer.mac.split(":")]
        eui = f"fe80::{octets[0] ^ 2:x}{octets[1]:02x}:{octets[2]:x}ff:fe{octets[3]:02x}:{octets[4]:x}{octets[5]:02x}"
        r = workloads.ping(vm, f"{eui}%{interface(vm, names[sender])}", 50)
        assert r["lost"] == 0, (sender, eui, r)
    clean(ctx)


def test_tcp_both_ways_uses_all_queues(ctx):
    """iperf3 in both directions with parallel streams; both receive queues take part."""
    names = devices(ctx)
    server, client = ctx.lab.vms
    for options in ("-P 8", "-P 8 -R"):
        r = workloads.iperf3(server, client, ctx.lab.rdma_functions[0].ip, 2, options)
        assert r["mbit_per_s"] > 20, (options, r)
    for vm, name in zip(ctx.lab.vms, names):
        lines = vm.must(f"ethtool -S {interface(vm, name)}").splitlines()
        counters = {key.strip(): int(value) for key, _, value in (line.partition(":") for line in lines) if value.strip()}
        assert counters["rx0_packets"] > 0 and counters["rx1_packets"] > 0, counters
        assert counters["rx_csum_complete"] > 0 and counters["rx_vport_unicast_packets"] > 0, counters
    clean(ctx)


def test_virtio_net_and_mlx5e_are_one_segment(ctx):
    """A virtio-net interface and an mlx5e interface reach each other, with ping and TCP."""
    names = devices(ctx)
    server, client = ctx.lab.vms
    other = interface(client, names[1])
    server.must("ip addr replace 10.2.0.1/24 dev eth0")
    client.must(f"ip addr replace 10.2.0.2/24 dev {other}")
    try:
        for vm, address in ((client, "10.2.0.1"), (server, "10.2.0.2")):
            for size in (56, 8972):
                r = workloads.ping(vm, address, 100, size)
                assert r["lost"] == 0, (address, size, r)
        for options in ("", "-R"):
            r = workloads.iperf3(server, client, "10.2.0.1", 2, options)
            assert r["mbit_per_s"] > 20, (options, r)
    finally:
        server.must("ip addr del 10.2.0.1/24 dev eth0")
        client.must(f"ip addr del 10.2.0.2/24 dev {other}")
    clean(ctx)


def test_offload_toggles(ctx):
    """The same bytes arrive whatever the interface leaves to the device."""
    names = devices(ctx)
    server, client = ctx.lab.vms
    other = interface(client, names[1])
    client.must("head -c 2000000 /dev/urandom > /tmp/data")
    want = client.must("sha256sum < /tmp/data")
    for toggle in ("tx off", "tx on tso off", "tso on rx off", "rx on"):
        client.must(f"ethtool -K {other} {toggle}")
        # Its input stays open: nc ends with its input, not only with its peer.
        server.must("pkill -x sleep; rm -f /tmp/got /tmp/end; (sleep 60 | "
                    "(timeout 60 nc -l -p 7000 > /tmp/got; touch /tmp/end)) >/dev/null 2>&1 & sleep 0.3")
        client.must(f"timeout 60 nc {ctx.lab.rdma_functions[0].ip} 7000 < /tmp/data", 70)
        got = server.must("for i in $(seq 100); do [ -e /tmp/end ] && break; sleep 0.1; done; sha256sum < /tmp/got", 30)
        assert got == want, toggle
    clean(ctx)


def test_perftest_over_roce(ctx):
    """Writes, reads, sends and datagrams by the GID of the IPv4 address."""
    server_index, index = (gid_index(vm, device) for vm, device in zip(ctx.lab.vms, devices(ctx)))
    assert server_index == index
    for name, size, options in (("ib_write_bw", 65536, ""), ("ib_read_bw", 65536, ""), ("ib_send_bw", 65536, "-e"),
                                ("ib_write_lat", 64, ""), ("ib_send_bw", 1024, "-c UD")):
        perftest(ctx, name, size, f"-x {index} {options}")
    clean(ctx)


def test_rdma_cm(ctx):
    """ib_write_bw -R and rping connect by IP address over the mlx5e interfaces."""
    own, _ = devices(ctx)
    server, client = ctx.lab.vms
    address = ctx.lab.rdma_functions[0].ip
    perftest(ctx, "ib_write_bw", 65536, "-R", address)
    running = server.guest.spawn("timeout 60 rping -s -C 20 -v 2>&1")
    time.sleep(0.5)
    text = client.must(f"timeout 60 rping -c -a {address} -C 20 -v 2>&1", 70)
    assert "rdma-ping-19" in text, text[-400:]
    ended, words = server.guest.wait(running, 70)
    assert "rdma-ping-19" in words, (ended, words[-400:])
    clean(ctx)


def test_interface_and_driver_come_and_go(ctx):
    """Down and up, other ring sizes and numbers of channels, and the driver loaded anew: traffic flows after each."""
    (_, device), (server, client) = devices(ctx), ctx.lab.vms
    f = ctx.lab.rdma_functions
    name = interface(client, device)
    for change in (f"ip link set {name} down; ip link set {name} up; ip addr replace {f[1].ip}/24 dev {name}",
                   f"ethtool -G {name} rx 256 tx 256", f"ethtool -L {name} combined 1",
                   f"ip link set {name} mtu 1500", "modprobe -r mlx5_ib && modprobe -r mlx5_core"):
        client.must(change, 60)
        devices(ctx)
        assert workloads.ping(client, f[0].ip, 50)["lost"] == 0, change
    perftest(ctx, "ib_write_bw", 65536, f"-x {gid_index(client, device)}")
    clean(ctx)


def test_idle_interface_leaves_the_em_asleep(ctx):
    """With the interfaces up and quiet an EM uses next to nothing."""
    devices(ctx)
    network.test_idle_em_sleeps(ctx)
