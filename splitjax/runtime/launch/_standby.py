"""A process that is started ahead: it imports what the run's workers have imported, and forks workers when the launcher
orders them. Run as a plain script by the workers' own interpreter.

`_standby.py SOCKET KIND TARGET MODULE,MODULE,... -- ARGUMENT...`: SOCKET is the descriptor of the launcher's end of a
socket, KIND and TARGET say what program the workers run (`programs.PythonProgram`), and the modules are imported here.
It touches no device, joins no run and starts no thread; a process that has threads says so and ends, because a fork of
it would not be sound.
"""

# Its own folder is where a script's modules are looked for first, and holds modules that are called as others are.
import sys

_PROGRAM = sys.argv[2:4]
sys.path[0] = ""

import os  # noqa: E402

if _PROGRAM[0] == "file":
    sys.path[0] = os.path.dirname(os.path.realpath(_PROGRAM[1]))
elif _PROGRAM[0] == "module":
    sys.path[0] = os.getcwd()

import ctypes  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import runpy  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402

PR_SET_PDEATHSIG = 1
MAX_ORDER_BYTES = 1 << 20
NUM_FILES = 5  # of a worker: output, errors, exit pipe, board, stacks
COMM_LENGTH = 15


def main() -> None:
    """Imports, says so, and serves orders until the launcher's end of the socket is closed."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    _, kind, target, modules, _, *arguments = sys.argv[1:]
    name_process("splitjax-ahead")
    for name in modules.split(","):
        importlib.import_module(name)
    if threading.active_count() > 1:
        tell(link, {"refuses": "an imported module started a thread"})
        return
    gc.collect()
    gc.freeze()  # what is imported stays, shared with the workers
    tell(link, {"ready": os.getpid()})
    order = serve(link)
    if order is not None:
        become(order, kind, target, arguments)


def serve(link):
    """Forks a worker for each order and reports their ends. Returns the order in the worker, None in this process once
    the launcher is gone."""
    children = {}
    while True:
        ready, _, _ = select.select([link, *children], [], [])
        for file in ready:
            if file is not link:
                pid = children.pop(file)
                os.close(file)
                _, status = os.waitpid(pid, 0)
                tell(link, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if link not in ready:
            continue
        data, files, _, _ = socket.recv_fds(link, MAX_ORDER_BYTES, NUM_FILES)
        if not data:
            return None
        parent = os.getpid()
        with warnings.catch_warnings():
            # The threads that Python would warn of are those of OpenBLAS, which stops them before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for file in children:
                os.close(file)
            link.close()
            return json.loads(data), files, parent
        for file in files:
            os.close(file)
        children[os.pidfd_open(pid)] = pid
        while leads_no_session(pid):  # the launcher would signal its group in vain
            time.sleep(0.0005)
        tell(link, {"forked": pid})


def become(order, kind, target, arguments) -> None:
    """Becomes the worker that the launcher ordered: its environment, its files, its session; then runs the program."""
    environment, (out, err, *files), parent = order
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    names = environment.pop("files")
    for name, file in zip(names, files, strict=True):
        os.set_inheritable(file, True)
        environment["values"][name] = str(file)
    os.environ.clear()
    os.environ.update(environment["values"])
    name_process(f"splitjax-{environment['rank']}")
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the others were forked with the same numbers
    from splitjax.runtime.launch.initialize import join_launched

    join_launched()
    if kind == "code":
        sys.argv = ["-c", *arguments]
        runpy_code(target)
    elif kind == "module":
        sys.argv = [target, *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *arguments]
        runpy.run_path(target, run_name="__main__")


def leads_no_session(pid: int) -> bool:
    """Returns whether the process `pid` runs and has no session of its own yet."""
    try:
        return os.getsid(pid) != pid and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except OSError:
        return False


def runpy_code(code: str) -> None:
    """Runs `code` as `python -c` does."""
    space = vars(sys.modules["__main__"])
    for name in [name for name in space if not name.startswith("__")]:
        del space[name]
    space.pop("__file__", None)
    exec(compile(code, "<string>", "exec"), space)


def tell(link, message) -> None:
    """Sends a message to the launcher."""
    try:
        link.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # it is gone, and this process ends with it


def name_process(name: str) -> None:
    """Gives this process the name under which `ps` shows it."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name[:COMM_LENGTH])
    except OSError:
        pass


if __name__ == "__main__":
    main()
