"""A process beside the launcher that kills what is left of the workers when the launcher dies.

Run as a plain script, without splitjax. Standard input names process groups, `+ID` and `-ID` a line. Its end means that
the launcher is gone, however it went: the groups still named are killed.
"""

import os
import signal
import sys

groups = set()
for line in sys.stdin:
    group = int(line[1:])
    if line[0] == "+":
        groups.add(group)
    else:
        groups.discard(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
