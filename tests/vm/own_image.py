"""A user's own disk and a user's own kernel."""

import os
import subprocess

from lab.host import ROOT
from lab.session import find_parts

from main_job import RUN

MAKE = os.path.join(ROOT, "tests", "vm", "make-disk.sh")


def run(*arguments, timeout=900):
    """run-vm.sh; its standard output."""
    done = subprocess.run([RUN, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-1500:]
    return done.stdout


def disk():
    """The folder of the test disk, made once and then cached."""
    return subprocess.run([MAKE], stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()[-1]


def test_own_image_boots_by_its_own_loader(ctx):
    """--image with a boot loader and cloud-init: addresses are set, the guests reach each other, the file stays."""
    image = os.path.join(disk(), "disk.raw")
    before = os.stat(image)
    assert "lost" in run("--image", image, "--test", "ping")
    assert os.stat(image).st_mtime_ns == before.st_mtime_ns


def test_own_image_boots_by_a_given_kernel(ctx):
    """--image with --kernel and --initrd finds the root in the first partition."""
    folder = disk()
    path = {name: os.path.join(folder, name) for name in ("disk.raw", "vmlinuz", "initrd.img")}
    assert "lost" in run("--image", path["disk.raw"], "--kernel", path["vmlinuz"], "--initrd", path["initrd.img"],
                         "--test", "ping")


def test_own_kernel_boots_the_projects_root(ctx):
    """--kernel alone: a packed kernel in place of the unpacked one."""
    kernel = os.path.join(os.path.dirname(find_parts()[1].kernel), "vmlinuz")
    assert "lost" in run("--kernel", kernel, "--test", "ping")
