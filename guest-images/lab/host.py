"""What this host can do: accelerator, memory, tools; and how child processes are started."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys

from .errors import LabError

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PR_SET_PDEATHSIG = 1


def say(text):
    """Progress for people, on stderr so that stdout stays a result."""
    print(f"== {text}", file=sys.stderr, flush=True)


def pick_accel(wanted):
    """`(name, why)`. KVM needs VMX or SVM in the CPU: /dev/kvm may open where Linux guests cannot run."""
    with open("/proc/cpuinfo") as f:
        flags = next((line.split() for line in f if line.startswith("flags")), [])
    virtual = "vmx" in flags or "svm" in flags
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    if wanted == "tcg":
        return "tcg", "asked for"
    if virtual and usable:
        return "kvm", "the CPU has VMX or SVM and /dev/kvm opens"
    if wanted == "kvm":
        cause = "the CPU shows neither VMX nor SVM" if not virtual else "/dev/kvm does not open for this user"
        raise LabError(f"--accel kvm cannot work here: {cause}; use --accel tcg or auto")
    if not virtual:
        return "tcg", "the CPU shows neither VMX nor SVM, so /dev/kvm (if there) cannot run Linux"
    return "tcg", "/dev/kvm is missing or does not open for this user"


def check_memory(guests, mib_each):
    """Refuses a lab that this host's free memory cannot hold."""
    with open("/proc/meminfo") as f:
        info = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in f}
    need = guests * (mib_each + 128) + 256
    have = info.get("MemAvailable", info.get("MemFree", 0))
    if have < need:
        raise LabError(
            f"{guests} guests of {mib_each} MiB need about {need} MiB of memory and {have} MiB are "
            "available; use fewer --guests or a smaller --memory")


def size_mib(text):
    """Parses 512M, 1G or a number of MiB."""
    units = {"M": 1, "G": 1024}
    number, unit = (text[:-1], units.get(text[-1:].upper())) if text[-1:].isalpha() else (text, 1)
    if unit is None or not number.isdigit() or int(number) == 0:
        raise LabError(f"`{text}` is no size of memory; write 512M or 2G")
    return int(number) * unit


def program(name, profile="release"):
    """Path of one of the workspace's programs."""
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
    path = os.path.join(target, os.environ.get("DISTDPU_PROFILE", profile), name)
    if not os.access(path, os.X_OK):
        raise LabError(f"{path} is missing; build it with `cargo build --release`")
    return path


def tool(name, package):
    """Path of a program of the system."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise LabError(f"the program `{name}` is missing; install the package {package}")
    return path


def start(argv, log, keep=False, **kwargs):
    """Starts a child whose output goes to `log`; it ends with this process unless `keep`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child():
        os.setpgid(0, 0)
        if not keep:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    with open(log, "ab") as out:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                preexec_fn=in_child, **kwargs)


def stop(process, seconds=5.0):
    """Asks a child to end, then makes it."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def script(name, *args):
    """Runs one of the scripts of guest-images/; the last line it prints is its answer."""
    path = os.path.join(ROOT, "guest-images", name)
    done = subprocess.run([path, *args], stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise LabError(f"guest-images/{name} failed; its messages are above")
    return lines[-1]
