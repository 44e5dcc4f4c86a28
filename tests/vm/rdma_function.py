"""The RDMA function under the stock mlx5 driver: probe, perftest in all its kinds, pingpongs with checked data."""

import time

from guestctl import TIMED_OUT
from lab import rdma, workloads

LAB = {"mtu": 9000, "rdma": "infiniband"}
RC_TESTS = ("ib_write_bw", "ib_read_bw", "ib_send_bw")
LAT_TESTS = ("ib_write_lat", "ib_read_lat", "ib_send_lat")


def devices(ctx):
    """Names of the devices in both guests, with the driver loaded."""
    return ctx.lab.bring_up_rdma()


def clean(ctx):
    """Fails when a guest's kernel complained."""
    for vm in ctx.lab.vms:
        found = rdma.complaints(vm)
        assert not found, f"{vm.name}: " + "; ".join(found[:5])


def perftest(ctx, name, size, options=""):
    """One perftest from vm1 to vm0 over the functions; something was measured and no kernel complained."""
    server, client = ctx.lab.vms
    r = workloads.perftest(server, client, ctx.lab.ip(0), name, size, options, devices(ctx))
    assert all(value > 0 for value in r.values()) or size < 64, (name, size, options, r)
    clean(ctx)
    return r


def pingpong(ctx, name, options=""):
    """One of the ibv_*_pingpong between the guests, both of which have to end well."""
    server, client = ctx.lab.vms
    own, other = devices(ctx)
    running = server.guest.spawn(f"timeout 90 {name} -d {own} {options} 2>&1")
    for _ in range(40):
        status, text = client.run(f"timeout 90 {name} -d {other} {options} {ctx.lab.ip(0)} 2>&1", 100)
        if status == 0 or "Couldn't connect" not in text:
            break
        time.sleep(0.25)
    if status != 0:
        server.guest.kill(running)
    ended, words = server.guest.wait(running, 100)
    assert status == 0 and ended == 0, (name, options, status, text[-400:], ended, words[-400:])
    for said in (text, words):
        assert "invalid data" not in said and "bytes in" in said, (name, options, said[-400:])
    clean(ctx)


def test_driver_probes_without_a_complaint(ctx):
    """mlx5_core binds by the PCI ids, mlx5_ib makes a device, and the kernel log stays clean."""
    devices(ctx)
    for vm in ctx.lab.vms:
        listed = vm.must("lspci -nk -d 15b3:")
        assert "15b3:101e" in listed and " 0207: " in listed and "driver in use: mlx5_core" in listed, listed
        assert vm.must("lspci -n -d 15b3: | wc -l").strip() == "1"
    clean(ctx)


def test_port_is_active_with_the_addresses_that_the_om_gave(ctx):
    """ibv_devinfo shows PORT_ACTIVE, InfiniBand, and the GUID, GID and LID that dpuctl shows."""
    lids = set()
    for vm, f, device in zip(ctx.lab.vms, ctx.lab.rdma_functions, devices(ctx)):
        told = ctx.lab.dpu.function(f.name)
        assert told["kind"] == "rdma" and told["state"] == "running" and told["link"] == "up", told
        info = vm.must(f"ibv_devinfo -v -d {device}")
        lines = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
        assert lines["state"].startswith("PORT_ACTIVE") and lines["link_layer"] == "InfiniBand", info
        assert int(lines["port_lid"]) == told["rdma"]["lid"], info
        assert lines["node_guid"].replace(":", "") == told["rdma"]["guid"], info
        gid = vm.must(f"cat /sys/class/infiniband/{device}/ports/1/gids/0").strip()
        assert gid.replace(":", "") == "fe80000000000000" + told["rdma"]["guid"], gid
        lids.add(lines["port_lid"])
    assert len(lids) == 2


def test_port_follows_the_administrator(ctx):
    """`dpuctl link set` takes the guest's port down and brings it back, and the driver hears of both."""
    vm, device = ctx.lab.vms[0], devices(ctx)[0]
    for state, want in (("down", "1: DOWN"), ("up", "4: ACTIVE")):
        ctx.lab.dpu.ctl("link", "set", ctx.lab.rdma_functions[0].name, state)
        deadline = time.monotonic() + 20
        while vm.must(f"cat /sys/class/infiniband/{device}/ports/1/state").strip() != want:
            assert time.monotonic() < deadline, f"the port is not {want} after link set {state}"
            time.sleep(0.2)
    perftest(ctx, "ib_write_bw", 65536)


def test_bandwidth_of_all_sizes(ctx):
    """ib_write_bw, ib_read_bw and ib_send_bw from 2 bytes to 8 MiB."""
    for name in RC_TESTS:
        for size in (2, 4096, 65536, 1 << 20, 8 << 20):
            perftest(ctx, name, size)


def timed_writes(ctx, seconds):
    """ib_write_bw for a time; each piece of it moved bytes and both ends end well. MiB/s."""
    server, client = ctx.lab.vms
    own, other = devices(ctx)
    options = f"-F -s 65536 -D {seconds}"
    running = server.guest.spawn(f"ib_write_bw -d {own} {options} 2>&1")
    time.sleep(1)
    ident = client.guest.spawn(f"stdbuf -oL ib_write_bw -d {other} {options} {ctx.lab.ip(0)} 2>&1")
    before, quiet, deadline = None, 0, time.monotonic() + seconds + 120
    while True:
        status, text = client.guest.wait(ident, max(1, seconds / 20))
        if status != TIMED_OUT:
            break
        assert time.monotonic() < deadline, text[-400:]
        if "#bytes" not in text:  # the head of the result: before it nothing is sent
            continue
        now = written(ctx)
        if now is None:
            continue
        quiet += now == before
        before = now
        # One at the end may be after the last write.
        assert quiet <= 1, text[-400:]
    ended, words = server.guest.wait(running, 60)
    assert status == 0 and ended == 0, (status, workloads.trouble(text), ended, workloads.trouble(words))
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["65536"]]
    assert len(rows) == 1 and float(rows[0][3]) > 0, text[-400:]
    clean(ctx)
    return float(rows[0][3])


def written(ctx):
    """Bytes that the client's function has written so far; None when its EM is too busy to say."""
    name = ctx.lab.rdma_functions[1].name
    found = (f for f in ctx.lab.dpu.ctl("stats")["functions"] if f["name"] == name)
    return next((q["bytes"] for f in found for q in f["queues"] if q["name"] == "write"), None)


def test_ten_seconds_of_writes(ctx):
    """ib_write_bw -D 10 keeps its pace and ends well."""
    timed_writes(ctx, 10)


def test_atomics_and_events(ctx):
    """Atomics of both kinds, and waiting for events: what needs more of the driver than writes do."""
    perftest(ctx, "ib_atomic_bw", 8, "-A CMP_AND_SWAP")
    perftest(ctx, "ib_atomic_lat", 8, "-A FETCH_AND_ADD -e")
    perftest(ctx, "ib_read_lat", 65536, "-e")
