"""More ways to take a peer away, one error for all of them, and the driver loaded twenty times."""

from lab import rdma
from rdma_function_life import LAB, expect_retry_exceeded, reload_driver, start_traffic, works  # noqa: F401


def test_driver_unloads_and_loads_twenty_times(ctx):
    """Twenty times modprobe -r and modprobe."""
    reload_driver(ctx, 20)


def test_driver_unbinds_under_traffic(ctx):
    """The server's driver is taken from its device: the peer's writes end with retry exceeded, then all works again."""
    ident = start_traffic(ctx)
    ctx.lab.vms[0].must(f"d=$(basename $(readlink /sys/class/infiniband/{rdma.device(ctx.lab.vms[0])}/device)); "
                        "cd /sys/bus/pci/drivers/mlx5_core; echo $d > unbind; sleep 1; echo $d > bind", 60)
    expect_retry_exceeded(ctx, ident)
    works(ctx)


def test_client_killed_under_traffic(ctx):
    """kill -9 of the requester's QEMU: the responder's guest lives on and takes the next connection."""
    start_traffic(ctx)
    ctx.lab.vms[1].kill()
    ctx.lab.replace_vm(1).start().wait_ready(90)
    ctx.lab.vms[0].must("pkill -x ib_write_bw; sleep 0.2; true")
    works(ctx)


def test_program_killed_under_traffic(ctx):
    """kill -9 of the server's program: its queue pairs are destroyed, and the peer's end with retry exceeded."""
    ident = start_traffic(ctx)
    ctx.lab.vms[0].must("pkill -9 -x ib_write_bw")
    expect_retry_exceeded(ctx, ident)
    works(ctx)


def test_administrator_takes_the_link_down(ctx):
    """`dpuctl link set … down` ends the paths: the peer's writes end with retry exceeded; after `up` all works again."""
    ident = start_traffic(ctx)
    name = ctx.lab.rdma_functions[0].name
    ctx.lab.dpu.ctl("link", "set", name, "down")
    expect_retry_exceeded(ctx, ident)
    ctx.lab.dpu.ctl("link", "set", name, "up")
    ctx.lab.vms[0].must("pkill -x ib_write_bw; sleep 0.2; true")
    works(ctx)
