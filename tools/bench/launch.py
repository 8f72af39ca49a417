"""Runs one command and writes its wall time, processor time and peak memory as JSON to a file.

    python -S -I launch.py RESULT.json COMMAND...

A bare process of its own, because a child's peak memory is never below that of the process that started it.
"""

import os
import sys
import time


def main():
    result, command = sys.argv[1], sys.argv[2:]
    start = time.monotonic()
    child = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - start
    scale = 1 if sys.platform == "darwin" else 1024
    with open(result, "w", encoding="utf-8") as out:
        out.write('{"seconds": %f, "cpu_seconds": %f, "peak_rss": %d}' % (
            seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale))
    sys.exit(os.waitstatus_to_exitcode(status) % 256)


main()
