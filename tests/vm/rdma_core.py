"""rdma-core's own Python tests in a guest, over the RDMA function: each passes, or skips itself because the device says that
it has not what the test needs, or is on the list below with the reason why it cannot pass."""

import json
import os

from applications import LAB as WITH_PROGRAMS, inside, programs
from lab.host import ROOT
from lab.rdma import complaints

PROGRAM = os.path.join(ROOT, "tests", "guest", "rdma_core_tests.py")
MODULES = ("test_device test_addr test_pd test_mr test_cq test_cqex test_cq_events test_srq test_qp test_qpex test_atomic "
           "test_parent_domain test_shared_pd test_relaxed_ordering test_fork test_odp test_flow test_rss_traffic "
           "test_tag_matching test_rdmacm").split()
# Tests of the vendor's extensions: those whose capability the device does not offer skip themselves.
MODULES_MLX5 = ("test_mlx5_cq test_mlx5_uar test_mlx5_huge_page test_mlx5_query_port test_mlx5_timestamp test_mlx5_raw_wqe "
                "test_mlx5_rdmacm test_mlx5_udp_sport test_mlx5_lag_affinity test_mlx5_mkey test_mlx5_dm_ops "
                "test_mlx5_pp test_mlx5_var test_mlx5_sched").split()

# The driver does not load without the XRC capability, and rdma-core's tests ask nothing else.
XRC = "the device has no XRC queue pairs"
MULTICAST = "the device has no multicast groups for datagrams"
# Why a test cannot pass.
CANNOT = {
    "test_cqex.CqExTestCase.test_xrc_traffic_cq_ex": XRC,
    "test_qpex.QpExTestCase.test_qp_ex_xrc_send": XRC,
    "test_qpex.QpExTestCase.test_qp_ex_xrc_send_imm": XRC,
    "test_atomic.AtomicTest.test_xrc_atomic_cmp_and_swap": XRC,
    "test_atomic.AtomicTest.test_xrc_atomic_fetch_and_add": XRC,
    "test_relaxed_ordering.RoTestCase.test_ro_xrc_traffic": XRC,
    "test_rdmacm.CMTestCase.test_rdmacm_async_multicast_traffic": MULTICAST,
    "test_rdmacm.CMTestCase.test_rdmacm_async_ex_multicast_traffic": MULTICAST,
    "test_rdmacm.CMTestCase.test_rdmacm_async_ex_leave_multicast_traffic": MULTICAST,
}
# What the driver logs about those.
EXPECTED = ("CREATE_QP(0x500)", "MODIFY_CQ(0x403)", "Create QP type 10", "ATTACH_TO_MCG", "failed attaching QPN",
            "counters are not supported on current FW")


def LAB():
    """The lab's settings."""
    return WITH_PROGRAMS()


def outcomes(ctx, modules):
    """What became of each test of these modules in the first guest: name → (outcome, why)."""
    device = programs(ctx)[0]
    vm = ctx.lab.vms[0]
    with open(PROGRAM) as f:
        vm.must(f"cat >/programs/root/rdma_core_tests.py <<'PYTHON'\n{f.read()}\nPYTHON")
    found = {}
    for module in modules:
        command = f"cd /root && timeout 900 python3 rdma_core_tests.py --dev {device} --gid 1 {module} 2>&1"
        _, text = vm.run(inside(command), 920)
        # Destructors may complain behind it.
        assert "\nEND\n" in text, (module, text[-600:])
        for line in text.splitlines():
            if line.startswith("RESULT "):
                result = json.loads(line[7:])
                found[result["test"].removeprefix("tests.")] = (result["outcome"], result["why"])
    return found


def judge(ctx, modules, least):
    """Nothing failed that is not on the list, what is on it did not pass, and `least` tests passed."""
    found = outcomes(ctx, modules)
    of = {word: sorted(name for name, (outcome, _) in found.items() if outcome == word)
          for word in ("ok", "skipped", "failed", "error")}
    failed = {name: found[name][1] for name in of["failed"] + of["error"] if name not in CANNOT}
    assert not failed, failed
    stale = [name for name in of["ok"] if name in CANNOT]
    assert not stale, f"on the list of what cannot pass, but did: {stale}"
    assert len(of["ok"]) >= least, (len(of["ok"]), of["skipped"])
    found = [line for line in complaints(ctx.lab.vms[0]) if not any(word in line for word in EXPECTED)]
    assert not found, found[:5]


def test_verbs(ctx):
    """Devices, regions, queues, transfers of every kind, events, addresses, rdma_cm."""
    judge(ctx, MODULES, 100)


def test_provider(ctx):
    """What the mlx5 provider adds."""
    judge(ctx, MODULES_MLX5, 12)
