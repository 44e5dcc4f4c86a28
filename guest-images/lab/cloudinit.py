"""A NoCloud seed for a user's own image: address, root console, and the agent that runs commands."""

import os

from . import host


def make_seed(run_dir, index, mtu):
    """A folder in `run_dir` that QEMU shows the guest as a CIDATA disk."""
    folder = os.path.join(run_dir, f"seed{index}")
    os.mkdir(folder)
    with open(os.path.join(host.ROOT, "guest-images", "agent.sh")) as f:
        agent = f.read()
    indented = "".join(f"      {line}" for line in agent.splitlines(keepends=True))
    files = {
        "meta-data": f"instance-id: distdpu-{index}\nlocal-hostname: vm{index}\n",
        "network-config": (
            "version: 2\nethernets:\n  dpu0:\n    match:\n"
            f'      macaddress: "02:00:00:00:00:{index + 1:02x}"\n'
            f"    addresses: [10.0.0.{index + 1}/24]\n    mtu: {mtu}\n"),
        "user-data": (
            "#cloud-config\ndisable_root: false\nssh_pwauth: true\n"
            "chpasswd: {expire: false, users: [{name: root, password: distdpu, type: text}]}\n"
            "write_files:\n  - path: /run/distdpu-agent\n    permissions: '0755'\n    content: |\n"
            f"{indented}"
            "runcmd:\n  - modprobe rdma_rxe || true\n"
            "  - rdma link add rxe0 type rxe netdev $(ip -o -4 addr show | awk '/10\\.0\\.0\\./{print $2; exit}') || true\n"
            # By its interpreter: Debian's initramfs mounts /run so that nothing there can be executed.
            "  - setsid sh /run/distdpu-agent ttyS1 >/dev/null 2>&1 &\n"),
    }
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as f:
            f.write(content)
    return folder
