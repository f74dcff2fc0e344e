"""The first moments of a worker, before it becomes the user's command. Run as a plain script, without splitjax.

`_shim.py LAUNCHER_PID ADDRESS COMMAND...`. The worker shall not outlive its launcher, which a process can ask for only
itself (Linux: prctl(2), PR_SET_PDEATHSIG). ADDRESS is that of a worker in a network namespace, `-` for any other: there
the host name must mean this address, because gloo connects to what the host name resolves to.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as shells have it


def main() -> None:
    """Becomes the command on the command line, after it is made sure that this process ends with its launcher.

    `sys.argv` has the launcher's process id, the address that the host name is to mean (`-` for none), and the command.
    """
    launcher, address, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(1)  # it died before the kernel was asked
    if address != "-":
        name_host(address)
    # Python ignores these, and what is ignored stays so in the command.
    for name in ("SIGPIPE", "SIGXFSZ", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def name_host(address: str) -> None:
    """Puts a hosts file, in which this host has the `address`, over /etc/hosts. The file lies in a memory file system
    of this mount namespace: nothing to clean up."""
    name = os.uname().nodename
    with open("/etc/hosts") as file:
        kept = [line for line in file if name not in line.split("#")[0].split()[1:]]
    folder = "/tmp"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    with open(f"{folder}/hosts", "w") as file:
        file.writelines([f"{address} {name}\n", *kept])
    subprocess.run(["mount", "--bind", f"{folder}/hosts", "/etc/hosts"], check=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


main()
