"""What users run between two guests, and the figures in what it prints."""

import json
import re
import time

from .errors import LabError

PERFTEST = {
    "ib_write_bw": "bw", "ib_send_bw": "bw", "ib_read_bw": "bw",
    "ib_write_lat": "lat", "ib_send_lat": "lat", "ib_read_lat": "lat",
    "ib_atomic_bw": "bw", "ib_atomic_lat": "lat",
}
PORT = 18515


def perftest(server, client, address, name="ib_write_bw", size=65536, options="", device="rxe0", count=None):
    """One perftest run. Bandwidth: `{mib_per_s, msg_per_s}`; latency: `{typical_us, p99_us}`.

    `device`: its name, or two names, when the server's has another than the client's. `count`: messages.
    """
    devices = [device] * 2 if isinstance(device, str) else device
    kind = PERFTEST[name]
    # By count: perftest's own timed runs report nothing when few messages fit into their time.
    if count is None:
        count = 1000 if size <= 4096 else 500 if size <= 65536 else 50 if size <= 1 << 20 else 10
        count *= 1 if kind == "lat" or devices[1].startswith("rxe") else 10
    if "atomic" in name:
        size, sized = 8, ""  # the only size that there is
    else:
        sized = f"-s {size} "
    commands = [f"{name} -d {d} -F {sized}-p {PORT} -n {count} {options}" for d in devices]
    for _ in range(4):
        row = run_perftest(server, client, address, name, commands, size)
        if kind == "lat":
            return {"typical_us": float(row[4]), "p99_us": float(row[7])}
        if float(row[3]) > 0 or size < 64:
            return {"mib_per_s": float(row[3]), "msg_per_s": float(row[4]) * 1e6}
        # perftest prints zero when it could not calibrate its clock, as on a busy host.
    raise LabError(f"{name} of {size} bytes measured nothing in four runs", client.console_log)


def run_perftest(server, client, address, name, commands, size):
    """The result row of one run, split into its columns."""
    server.must(f"pkill -x {name} 2>/dev/null; {commands[0]} >/tmp/server.log 2>&1 </dev/null & sleep 0.2", 20)
    for _ in range(20):
        status, text = client.run(f"timeout 90 {commands[1]} {address} 2>&1", 105)
        if status == 0 or "Couldn't connect" not in text:
            break
        time.sleep(0.25)
    if status != 0:
        words = server.run("cat /tmp/server.log", 20)[1]
        raise LabError(f"{name} of {size} bytes ended with {status}: {trouble(text)}; server: {trouble(words)}",
                       client.console_log)
    row = next((line.split() for line in reversed(text.splitlines())
                if re.match(rf"\s*{size}\s+\d", line)), None)
    if row is None:
        raise LabError(f"{name} printed no result line: {last_line(text)}", client.console_log)
    return row


def trouble(text):
    """The lines of some output that speak of an error, or else its last one: errors come before what was buffered."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"couldn't|fail|unable|error|status", line, re.I)]
    return "; ".join(lines[:4]) or last_line(text)


def last_line(text):
    """The last line of some output that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return lines[-1] if lines else "(no output)"


def iperf3(server, client, address, seconds=3, options=""):
    """TCP (or, by `options`, UDP) from client to server; `-R` in the options turns it round. Mb/s received."""
    server.must("pkill -x iperf3 2>/dev/null; iperf3 -s -D --logfile /tmp/iperf3.log; sleep 0.2", 20)
    status, text = client.run(f"iperf3 -J -c {address} -t {seconds} {options} 2>&1", seconds + 60)
    try:
        end = json.loads(text)["end"]
        total = end.get("sum_received") or end["sum"]
        return {"mbit_per_s": total["bits_per_second"] / 1e6}
    except (ValueError, KeyError):
        raise LabError(f"iperf3 ended with {status}: {last_line(text)}", client.console_log)


def ping(client, address, count=1000, size=56, flood=True):
    """Round trip of flood pings: `{avg_us, min_us, lost}`."""
    status, text = client.run(
        f"ping -q -n -c {count} -s {size} {'-f' if flood else '-i 0.2'} {address} 2>&1", 120)
    times = re.search(r"= ([\d.]+)/([\d.]+)/", text)
    lost = re.search(r"([\d.]+)% packet loss", text)
    if times is None or lost is None:
        raise LabError(f"ping {address} ended with {status}: {last_line(text)}", client.console_log)
    return {"min_us": float(times[1]) * 1e3, "avg_us": float(times[2]) * 1e3, "lost": float(lost[1])}
