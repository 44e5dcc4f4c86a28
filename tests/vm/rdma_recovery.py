"""EMs that are killed under RDMA between guests: neither the programs nor the drivers notice."""

import time

from lab import workloads
from guestctl import TIMED_OUT
from recovery import KILLS, replace
from rdma_function import clean, devices, perftest

LAB = {"mtu": 9000, "rdma": "infiniband"}
# How long the program writes; the last kill is well before its end.
SECONDS = 10 + 4 * KILLS


def killed_under(ctx, name, options=""):
    """A perftest from vm1 to vm0 during which EMs are killed in turn; both ends end well."""
    server, client = ctx.lab.vms
    own, other = devices(ctx)
    options = f"-F -D {SECONDS} {options}"
    running = server.guest.spawn(f"{name} -d {own} {options} 2>&1")
    time.sleep(1)
    ident = client.guest.spawn(f"stdbuf -oL {name} -d {other} {options} {ctx.lab.ip(0)} 2>&1")
    deadline = time.monotonic() + 60
    while True:
        status, text = client.guest.wait(ident, 1)
        assert status == TIMED_OUT, (status, text[-600:])
        if "#bytes" in text:  # the head of the result: before it nothing is sent
            break
        assert time.monotonic() < deadline, text[-600:]
    for n in range(KILLS):
        time.sleep(1.5 + 0.37 * (n % 3))
        replace(ctx, ctx.lab.rdma_functions[n % 2].em)
    status, text = client.guest.wait(ident, SECONDS + 60)
    ended, words = server.guest.wait(running, 60)
    assert status == 0 and ended == 0, (status, workloads.trouble(text), ended, workloads.trouble(words))
    clean(ctx)


def test_em_killed_under_writes(ctx):
    """kill -9 of either EM under ib_write_bw, again and again: status 0 and quiet kernels."""
    killed_under(ctx, "ib_write_bw", "-s 65536")


def test_em_killed_under_sends(ctx):
    """The same with ib_send_bw: each message is received once."""
    killed_under(ctx, "ib_send_bw", "-s 4096")


def test_everything_works_afterwards(ctx):
    """New queue pairs and keys after the kills, on the drivers that are loaded."""
    perftest(ctx, "ib_read_bw", 65536)
    perftest(ctx, "ib_send_bw", 4096, "-e")
    perftest(ctx, "ib_atomic_bw", 8, "-A FETCH_AND_ADD")
