"""Runs a command with a memory limit, page cache included: in a memory control group of its own."""

import os
import uuid

import measure


class Limit:
    """`with Limit(bytes) as limit: limit.command([...])`. Needs root and a control group that may have children."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        parent, file = place()
        self.group = os.path.join(parent, f"hpp-bench-{uuid.uuid4().hex[:8]}")
        try:
            os.mkdir(self.group)
            with open(os.path.join(self.group, file), "w", encoding="ascii") as limit:
                limit.write(str(int(self.size)))
        except OSError as error:
            raise measure.Failed(f"no memory limit can be set here ({error}): run as root with a memory control group")
        return self

    def command(self, command):
        """The command that runs `command` in the group."""
        enter = f'echo $$ > {os.path.join(self.group, "cgroup.procs")} && exec "$@"'
        return ["/bin/sh", "-c", enter, "limited", *map(str, command)]

    def __exit__(self, *_):
        try:
            os.rmdir(self.group)
        except OSError:
            pass


def place():
    """This process's memory group and the name of its limit file, in version 1 or 2 of control groups."""
    with open("/proc/self/cgroup", encoding="ascii") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                return "/sys/fs/cgroup/memory" + path.rstrip("/"), "memory.limit_in_bytes"
            if controllers == "" and os.path.exists(f"/sys/fs/cgroup{path.rstrip('/')}/memory.max"):
                return "/sys/fs/cgroup" + path.rstrip("/"), "memory.max"
    return "/sys/fs/cgroup", "memory.max"
