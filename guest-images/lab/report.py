"""Tables for people, JSON for scripts."""

import json
import os


def table(header, rows):
    """Columns as wide as their content; numbers to the right."""
    cells = [[str(c) for c in header]] + [[number(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for index, row in enumerate(cells):
        lines.append("  ".join(
            c.rjust(w) if index and not isinstance(rows[index - 1][i], str) else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths))).rstrip())
        if index == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)


def number(value):
    """Floats with the digits that matter."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)


def write_json(path, data):
    """Writes results whole or not at all."""
    part = f"{path}.part"
    with open(part, "w") as f:
        json.dump(data, f, indent=2)
        f.write("\n")
    os.replace(part, path)


def append_metric(path, metric, value, unit, compared_with=None, ratio=None, samples=()):
    """One line of a bench's `target/bench/NAME.jsonl`."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as f:
        f.write(json.dumps({"metric": metric, "value": value, "unit": unit, "compared_with": compared_with,
                            "ratio": ratio, "samples": list(samples)}) + "\n")
