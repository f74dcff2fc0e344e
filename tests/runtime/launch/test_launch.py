"""The launcher, over scripts that do not import JAX: what ends a run, who is named, what is started again, what is left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from splitjax.cli import main
from splitjax.errors import LaunchError
from splitjax.runtime.launch import launch
from splitjax.runtime.launch.outcome import LaunchAttempt, LaunchOutcome, WorkerExit, failure_text
from tests.runtime.conftest import command, is_alive, until

RANK = "import os, sys, time, signal; rank = int(os.environ['SPLITJAX_PROCESS_ID']); "
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and asks the kernel to kill with the parent")


def test_every_worker_runs_and_every_line_has_its_rank(launched):
    run = launched(
        RANK + "print('one\\ntwo'); print('to error', file=sys.stderr); sys.stdout.write('no end')", num_processes=3
    )
    assert run.wait().status == 0
    lines = run.out.getvalue().splitlines()
    for rank in range(3):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] one",
            f"[{rank}] two",
            f"[{rank}] no end",
        ]
    assert sorted(run.err.getvalue().splitlines()) == [f"[{rank}] to error" for rank in range(3)]


@pytest.mark.parametrize(
    ("death", "status", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("1 / 0", 1, "exit code 1"),
    ],
)
def test_a_worker_that_dies_ends_the_run(launched, death, status, words):
    script = RANK + f"print('\\n'.join(map(str, range(50))))\nif rank == 2: {death}\ntime.sleep(100)"
    began = time.monotonic()
    run = launched(script, num_processes=3, grace_seconds=0.3)
    outcome = run.wait()
    assert time.monotonic() - began < 10
    assert outcome.status == status
    failed = outcome.attempts[0].failed
    assert failed.rank == 2 and words in str(failed)
    assert len(failed.last_lines) == 20 and "49" in failed.last_lines
    first, *others = outcome.attempts[0].exits
    assert first is failed and not first.killed and all(end.killed for end in others)
    assert f"worker 2 failed after {failed.seconds:.1f} s: {words}" in run.err.getvalue()
    assert "after it: workers 0, 1: killed by the launcher" in run.err.getvalue()


def test_the_first_to_leave_is_named_though_it_ends_last(launched):
    # Worker 1 says that it leaves, as a joined process does at its exit; worker 0 fails because of that, and is gone
    # sooner.
    script = (
        RANK + "\nif rank == 1: os.write(int(os.environ['SPLITJAX_EXIT_FD']), b'1\\n'); time.sleep(1);"
        " sys.exit(5)\ntime.sleep(0.5); sys.exit(1)"
    )
    outcome = launched(script, num_processes=2).wait()
    assert outcome.attempts[0].failed.rank == 1 and outcome.status == 5


def test_a_worker_may_end_well_before_the_others(launched):
    outcome = launched(RANK + "time.sleep(0.6 * rank)", num_processes=2).wait()
    assert outcome.status == 0 and [end.code for end in outcome.attempts[0].exits] == [0, 0]


SIGN = "sign = lambda said: os.write(int(os.environ['SPLITJAX_EXIT_FD']), (said + '\\n').encode())\n"


def test_a_worker_that_falls_silent_is_killed_at_the_stated_time_and_named(launched):
    script = (
        RANK + SIGN + "sign(f'alive {os.getpid()}'); print('still here', flush=True)\nwhile rank == 0: time.sleep(0.2);"
        " sign(f'alive {os.getpid()}')\ntime.sleep(100)"
    )
    run = launched(script, num_processes=2, heartbeat_seconds=1, grace_seconds=0.3, restarts=1)
    outcome = run.wait()
    assert outcome.status == 137 and len(outcome.attempts) == 2
    for attempt in outcome.attempts:
        assert attempt.failed.rank == 1 and attempt.failed.silent_seconds == 1 and attempt.failed.seconds < 5
        assert attempt.failed_unix_seconds is not None and attempt.exits[1].killed
    assert "killed by the launcher: no sign of life for 1 s" in run.err.getvalue()


@pytest.mark.parametrize(
    "script",
    [
        "",  # never joined
        "sign(f'alive {os.getpid()}'); sign('0')",  # leaves, and takes its time
        # its script is over
        "import subprocess; child = subprocess.Popen(['true']); child.wait(); sign(f'alive {child.pid}')",
    ],
)
def test_no_sign_is_expected_of_who_does_not_train(launched, script):
    assert launched(RANK + SIGN + script + "\ntime.sleep(1.6)", heartbeat_seconds=1).wait().status == 0


def test_a_launcher_that_stood_still_does_not_blame_its_workers():
    script = RANK + SIGN + "print('up', flush=True)\nfor _ in range(30): sign(f'alive {os.getpid()}'); time.sleep(0.2)"
    with command("--heartbeat-seconds", "2", "--", sys.executable, "-c", script) as process:
        assert "up" in process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0, process.stderr.read()


def test_stragglers_have_the_stated_time(launched):
    run = launched(RANK + "time.sleep(100 * rank)", num_processes=2, exit_timeout_seconds=0.3)
    assert run.wait().status == 137
    assert "the 0.3 s to end after worker 0 had ended well were over" in run.err.getvalue()


def test_restarts_start_all_workers_again_and_say_when_the_last_attempt_failed(launched):
    script = (
        RANK + "print('facts', os.environ['SPLITJAX_ATTEMPT'], os.environ['SPLITJAX_COORDINATOR'],"
        " os.environ['SPLITJAX_LAUNCH_UNIX_SECONDS'], os.environ.get('SPLITJAX_FAILED_UNIX_SECONDS'))\nif rank == 1"
        " and os.environ['SPLITJAX_ATTEMPT'] < '2': sys.exit(3)"
    )
    run = launched(script, num_processes=2, restarts=3)
    outcome = run.wait()
    assert outcome.status == 0 and [attempt.status for attempt in outcome.attempts] == [3, 3, 0]
    facts = [line.split()[2:] for line in run.out.getvalue().splitlines() if line.startswith("[1]")]
    assert [fact[0] for fact in facts] == ["0", "1", "2"]
    assert len({fact[1] for fact in facts}) == 3 and all(fact[1].startswith("127.0.0.1:") for fact in facts)
    assert facts[0][3] == "None" and float(facts[1][2]) >= float(facts[1][3]) >= float(facts[0][2])
    assert "starting all workers again: restart 2 of 3" in run.err.getvalue()


def test_restarts_are_used_up(launched):
    run = launched("raise SystemExit(4)", restarts=1)
    assert run.wait().status == 4 and len(run.run.wait().attempts) == 2
    assert "all 1 restarts are used up" in run.err.getvalue()


ABORTS_ONCE = (
    RANK + "import signal\nif os.environ['SPLITJAX_ATTEMPT'] == '0' and rank == 1: time.sleep(0.3); os.abort()\n"
    "if os.environ['SPLITJAX_ATTEMPT'] == '0': time.sleep(60)"
)


def test_a_clock_that_was_set_back_is_blamed_and_no_restart_counted(launched, monkeypatch):
    # JAX aborts all workers then; the time between the attempt's two looks at the clocks is what tells it.
    offsets = iter([7200.0, 3600.0, 3600.0, 3600.0])
    monkeypatch.setattr(launch, "_clock_offset_seconds", lambda: next(offsets))
    run = launched(ABORTS_ONCE, num_processes=2, restarts=0)
    outcome = run.wait()
    assert outcome.status == 0 and len(outcome.attempts) == 2
    assert outcome.attempts[0].clock_set_back_seconds == 3600.0 and not outcome.attempts[1].ended_by_clock
    said = run.err.getvalue()
    assert "no worker is at fault: this machine's clock was set back by 3600 s" in said
    assert "not counted as a restart" in said and "restarts are used up" not in said


@pytest.mark.parametrize(("script", "moved"), [(ABORTS_ONCE, -3600.0), (ABORTS_ONCE, 0.5), ("sys.exit(3)", 3600.0)])
def test_other_ends_are_not_blamed_on_the_clock(launched, monkeypatch, script, moved):
    offsets = iter([7200.0, 7200.0 - moved])
    monkeypatch.setattr(launch, "_clock_offset_seconds", lambda: next(offsets))
    run = launched("import sys\n" + script, num_processes=2, restarts=0)
    assert run.wait().status != 0 and len(run.run.wait().attempts) == 1
    assert "no worker is at fault" not in run.err.getvalue()


SAVES = (
    RANK + "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\nprint('ready',"
    " flush=True)\nwhile True: time.sleep(0.05)"
)


def test_a_stop_lets_workers_save_and_is_not_restarted(launched):
    run = launched(SAVES, num_processes=2, restarts=2)
    run.until("ready", 2)
    run.run.stop(signal.SIGINT)
    outcome = run.wait()
    assert outcome.status == 130 and len(outcome.attempts) == 1 and outcome.attempts[0].failed is None
    assert run.out.getvalue().count("saved") == 2


def test_a_stop_waits_for_what_a_worker_started(launched):
    # The worker is a wrapper that dies of the signal; the process that saves is its child.
    slow = SAVES.replace("(print('saved'", "(time.sleep(0.3), print('saved'")
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {slow!r}])"
    run = launched(script)
    run.until("ready")
    run.run.stop()
    assert run.wait().status == 143
    assert "saved" in run.out.getvalue()


def test_who_does_not_stop_is_killed_at_the_stated_time(launched):
    script = RANK + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(100)"
    run = launched(script, num_processes=2, stop_timeout_seconds=0.5)
    run.until("ready", 2)
    run.run.stop()
    assert run.wait().status == 143
    assert (
        "the 0.5 s to save and exit were over" in run.err.getvalue()
        and "workers 0, 1: killed by the launcher" in run.err.getvalue()
    )


def test_a_sigterm_from_outside_is_told_from_a_failure(launched):
    script = (
        SAVES.replace("while True", "began = time.time()\nwhile rank == 1 or time.time() < began + 1.5")
        + "\nsys.exit(143)"
    )
    run = launched(script, num_processes=2, restarts=1, grace_seconds=0.1)
    run.until("ready", 2)
    os.kill(run.run.workers[1].pid, signal.SIGTERM)
    # Worker 0 takes longer to leave than it had after a failure.
    outcome = run.wait()
    assert outcome.status == 143 and len(outcome.attempts) == 1
    assert [(end.rank, end.code) for end in outcome.attempts[0].exits] == [(1, 143), (0, 143)]
    assert "worker 1 left with exit code 143: a SIGTERM from outside stopped the run" in run.err.getvalue()


@linux
def test_nothing_that_a_worker_started_outlives_it(launched):
    child = (
        "import subprocess, sys; print('child', subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(100)']).pid, flush=True)"
    )
    run = launched(child + "\nsys.exit(1)")
    assert run.wait().status == 1
    pid = int(run.out.getvalue().split("child ")[1])
    until(lambda: not is_alive(pid), seconds=5)


def test_logs(launched, tmp_path):
    run = launched(
        RANK + "print('out'); print('bad', file=sys.stderr); sys.exit(1)",
        num_processes=2,
        restarts=1,
        log_dir=tmp_path / "logs",
    )
    run.wait()
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == [f"worker-{rank}.attempt-{attempt}.log" for rank in range(2) for attempt in range(2)]
    assert sorted((tmp_path / "logs" / names[0]).read_text().splitlines()) == ["bad", "out"]


def test_environment_of_workers(launched):
    names = ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "SPLITJAX_LOCAL_DEVICE_IDS", "SPLITJAX_NUM_PROCESSES")
    run = launched(
        RANK + f"print([os.environ.get(name) for name in {names}])",
        num_processes=2,
        threads=1,
        devices_per_process=2,
        gpus_per_process=2,
    )
    run.wait()
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    assert f"[1] ['1', '{flags}', '2', '2,3', '2']" in run.out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "no command to start"),
        (["-n", "0", "--", "true"], "num_processes must be at least 1"),
        (["--", "no-such-program"], "the command does not exist"),
        (["--", "./file"], "the command is not executable"),
        (["--log-dir", "file/logs", "--", "true"], "the folder for the workers' logs cannot be used"),
        (["--network-json", "x.json", "--", "true"], "nothing is counted"),
        (["--bandwidth", "200mbps", "--", "true"], "a bandwidth is a number of kbit, mbit or gbit"),
    ],
)
def test_mistakes_are_explained(arguments, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and "remedy:" in err


def test_what_follows_two_dashes_is_the_command(capsys):
    assert (
        main(
            [
                "launch",
                "-n",
                "2",
                "--",
                sys.executable,
                "-c",
                "import sys; print(sys.argv[1:])",
                "-n",
                "--help",
                "--",
                "x",
            ]
        )
        == 0
    )
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[{rank}] ['-n', '--help', '--', 'x']" for rank in range(2)
    ]


def test_handlers_of_signals_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    main(["launch", "--", "true"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@linux
def test_signals_to_the_command_and_a_second_ctrl_c():
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); print('ready',"
        " flush=True)\nwhile True: time.sleep(0.05)"
    )
    with command("-n", "2", "--", sys.executable, "-c", stubborn) as run:
        assert {run.stdout.readline(), run.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        run.send_signal(signal.SIGINT)
        assert {run.stdout.readline(), run.stdout.readline()} == {"[0] asked\n", "[1] asked\n"}
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130


@linux
def test_a_killed_launcher_leaves_nothing():
    tree = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(100)']);print(os.getpid(), child.pid, flush=True); time.sleep(100)"
    )
    with command("-n", "2", "--", sys.executable, "-c", tree) as run:
        pids = [int(pid) for _ in range(2) for pid in run.stdout.readline().split()[1:]]
        assert len(pids) == 4 and all(map(is_alive, pids))
        run.kill()
        until(lambda: not any(map(is_alive, pids)), seconds=10)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    script = (
        f"import os, time\nfor i in range(20000): print('x' * 50)\nopen({str(tmp_path / 'done')!r} +"
        " os.environ['SPLITJAX_PROCESS_ID'], 'w')"
    )
    with command("-n", "2", "--", sys.executable, "-c", script) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(60) == 0
    assert (tmp_path / "done0").exists() and (tmp_path / "done1").exists()


def test_an_early_well_ended_worker_is_mentioned():
    well, failed = WorkerExit(1, 0, 1.0, False), WorkerExit(0, 1, 1.5, False, ("boom",))
    text = failure_text(LaunchAttempt(0, 0.0, 1.5, (well, failed), failed))
    assert (
        "worker 0 failed after 1.5 s: exit code 1\nits last lines:\n    boom\nworker 1 had left with exit code 0 0.5 s"
        " before" in text
    )


def test_status_of_an_outcome():
    end = WorkerExit(0, -11, 1.0, False)
    assert LaunchOutcome((LaunchAttempt(0, 0.0, None, (end,), end),)).status == 139
    assert LaunchOutcome((LaunchAttempt(0, 0.0, None, (end,), None),), signal.SIGINT).status == 130


def test_help_is_one_page():
    done = subprocess.run(
        [sys.executable, "-m", "splitjax.cli", "launch", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert "splitjax launch -n 4 -- python train.py" in done.stdout and "-- COMMAND [ARGUMENT ...]" in done.stdout
    assert len(done.stdout.splitlines()) < 70


def test_a_config_that_cannot_be():
    with pytest.raises(LaunchError, match="restarts must be at least 0"):
        launch.LaunchConfig(restarts=-1)


def test_a_sign_that_was_read_before_the_launcher_stood_still_is_not_too_old(monkeypatch):
    from splitjax.runtime.launch import watch as watching

    class Worker:
        rank, killed = 0, False

        def signal_group(self, number):
            self.killed = True

    now, worker = [100.0], Worker()
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    watch = watching.Watch(launch.LaunchConfig(heartbeat_seconds=1), None)
    watch.start([worker])
    watch.take(watching.Event(0, 100.0, alive=os.getpid()))
    now[0] += 2.0
    watch._end_hung()
    watch.take(watching.Event(0, 100.1, alive=os.getpid()))  # read before, taken behind
    now[0] += 0.1
    watch._end_hung()
    assert not worker.killed
    for _ in range(20):
        now[0] += 0.1
        watch._end_hung()
    assert worker.killed  # and from then on its silence counts
