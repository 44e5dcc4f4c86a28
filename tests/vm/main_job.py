"""The command a newcomer runs, as a newcomer runs it."""

import json
import os
import subprocess
import tempfile

from lab.host import ROOT

RUN = os.path.join(ROOT, "run-vm.sh")


def leftovers(before=()):
    """Processes of labs that are there, but for those that were `before`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read()
        except OSError:
            continue
        if b"distdpu-" in line and (b"qemu" in line or b"/om\0" in line or b"/em\0" in line):
            found.append(pid)
    return [pid for pid in found if pid not in before]


def test_one_command_ends_with_a_perftest_table(ctx):
    """./run-vm.sh prints a bandwidth for every size, writes JSON, leaves nothing behind."""
    before = leftovers()
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        done = subprocess.run([RUN, "--json", out], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-800:]
        assert "MiB/s" in done.stdout, done.stdout
        with open(out) as f:
            results = json.load(f)["results"]
        sizes = [2, 4096, 65536, 1048576]
        for device in ("soft RoCE", "RDMA function"):
            assert [r["bytes"] for r in results if r["device"] == device] == sizes, results
            assert device in done.stdout, done.stdout
        # perftest prints MiB/s with two decimals, which is nothing for some thousand messages of two bytes.
        assert all(r["msg_per_s"] > 0 and (r["mib_per_s"] > 0 or r["bytes"] < 64) for r in results), results
    assert not leftovers(before), leftovers(before)


def test_without_rdma_functions_there_is_soft_roce(ctx):
    """./run-vm.sh --no-rdma-function measures soft RoCE alone."""
    before = leftovers()
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        done = subprocess.run([RUN, "--no-rdma-function", "--test", "ib_write_lat", "--json", out],
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-800:]
        with open(out) as f:
            results = json.load(f)["results"]
        assert {r["device"] for r in results} == {"soft RoCE"}, results
    assert not leftovers(before), leftovers(before)


def test_a_command_that_fails_in_the_guest_gives_its_status(ctx):
    """--test 'exit 7' ends with status 7."""
    done = subprocess.run([RUN, "--test", "ping -c 1 $PEER >/dev/null && exit 7"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, (done.returncode, done.stderr[-500:])


def test_bad_input_is_one_sentence(ctx):
    """Each mistake is named with its remedy, and nothing starts."""
    before = leftovers()
    with tempfile.NamedTemporaryFile(suffix=".img") as rubbish:
        rubbish.write(b"not a disk" * 1000)
        rubbish.flush()
        for arguments, words in (
            (["--image", rubbish.name], "is no disk image"),
            (["--image", "/nonexistent.qcow2"], "there is no such file"),
            (["--guests", "1"], "a test needs two guests"),
            (["--mtu", "20000"], "give 68 to 9000"),
            (["--memory", "900G"], "are available"),
            (["--memory", "lots"], "is no size of memory"),
            (["--qemu-arg=-incoming"], "migration"),
            (["--qemu-arg=-object memory-backend-ram,id=m1,size=1G"], "share=on"),
        ):
            done = subprocess.run([RUN, *arguments], capture_output=True, text=True, timeout=300)
            said = [line for line in done.stderr.splitlines() if not line.startswith("==")]
            assert done.returncode == 1 and len(said) == 1 and words in said[0], (arguments, done.returncode, said)
    assert not leftovers(before), leftovers(before)
