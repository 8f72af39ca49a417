"""Runs a command with a memory limit, page cache included: in a memory control group of its own."""

import os
import uuid

import measure


class Limit:
    """`with Limit(bytes) as limit: limit.command([...])`. Needs root and a control group that may have children."""

    def __init__(self, size):
        self.size = self.most = int(size)

    def __enter__(self):
        parent, file = place()
        self.group = os.path.join(parent, f"hpp-bench-{uuid.uuid4().hex[:8]}")
        self.file = os.path.join(self.group, file)
        try:
            os.mkdir(self.group)
            self.set(self.size)
        except OSError as error:
            raise measure.Failed(f"no memory limit can be set here ({error}): run as root with a memory control group")
        return self

    def set(self, size):
        """Changes the limit; OSError if what is in use cannot be reclaimed (version 1)."""
        with open(self.file, "w", encoding="ascii") as limit:
            limit.write(str(int(size)))
        self.size = int(size)

    def command(self, command):
        """The command that runs `command` in the group."""
        enter = f'echo $$ > {os.path.join(self.group, "cgroup.procs")} && exec "$@"'
        return ["/bin/sh", "-c", enter, "limited", *map(str, command)]

    def __exit__(self, *_):
        try:
            os.rmdir(self.group)
        except OSError:
            pass


class ReadRate(Limit):
    """A memory limit and a read rate, bytes per second, for the disk of a folder. OSError where no rate can be set."""

    def __init__(self, folder, rate, size):
        super().__init__(size)
        device = os.stat(folder).st_dev
        self.disk, self.rate = f"{os.major(device)}:{os.minor(device)}", rate

    def __enter__(self):
        super().__enter__()
        parent, self.rate_file, self.line = rate_place()
        self.disk_group = os.path.join(parent, os.path.basename(self.group))
        os.makedirs(self.disk_group, exist_ok=True)
        self.set_rate(self.rate)
        return self

    def set_rate(self, rate):
        with open(os.path.join(self.disk_group, self.rate_file), "w", encoding="ascii") as limit:
            limit.write(self.line.format(disk=self.disk, rate=int(rate)))

    def command(self, command):
        enter = f'echo $$ > {os.path.join(self.disk_group, "cgroup.procs")} && exec "$@"'
        return super().command(["/bin/sh", "-c", enter, "limited", *command])

    def __exit__(self, *_):
        super().__exit__()
        try:
            os.rmdir(self.disk_group)
        except OSError:
            pass


def rate_place():
    """This process's group for disks, the name of its rate file and the form of its lines, in version 1 or 2 of control groups."""
    with open("/proc/self/cgroup", encoding="ascii") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "blkio" in controllers.split(","):
                return "/sys/fs/cgroup/blkio" + path.rstrip("/"), "blkio.throttle.read_bps_device", "{disk} {rate}"
    parent, _ = place()
    return parent, "io.max", "{disk} rbps={rate}"


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
