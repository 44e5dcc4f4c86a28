"""The one error people see: a sentence that names the cause and, where there is one, the log to read."""


class LabError(Exception):
    """Something a user can act on. `log` is a file with the details."""

    def __init__(self, sentence, log=None):
        super().__init__(sentence)
        self.log = log

    def __str__(self):
        text = super().__str__()
        return f"{text} (log: {self.log})" if self.log else text


def tail(path, lines=15):
    """The last lines of a log, for an error message; empty when it cannot be read."""
    try:
        with open(path, "rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - 8192))
            return b"\n".join(f.read().splitlines()[-lines:]).decode(errors="replace")
    except OSError:
        return ""
