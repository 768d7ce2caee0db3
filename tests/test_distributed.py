"""How the processes of a run find one another: flags, the environment, and what is said when one does not come."""

import os
import signal
import threading

import jax
import pytest

from synthesizer_jax.__main__ import main
from synthesizer_jax.training import distributed

THREE = {"coordinator_address": "localhost:8476", "process_count": 2, "process_index": 1}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}


@pytest.fixture
def begun(monkeypatch):
    """What JAX was asked, none of which it does."""
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: asked.append((args, options)))
    yield asked
    jax.config.update("jax_enable_preemption_service", True)


def test_flags_are_taken_as_they_are_and_nothing_is_looked_for(begun):
    distributed.start(**THREE, timeout=20, preemption=False)
    ((args, options),) = begun
    assert args == ("localhost:8476", 2, 1)
    assert options["cluster_detection_method"] == "deactivate" and options["initialization_timeout"] > 20
    assert jax.config.jax_enable_preemption_service is False


def test_without_flags_jax_looks_at_the_environment(begun):
    distributed.start()
    ((args, options),) = begun
    assert args == (None, None, None) and options["cluster_detection_method"] is None
    assert jax.config.jax_enable_preemption_service is True


def test_one_process_alone_starts_nothing(begun):
    distributed.start(process_count=1)
    assert not begun


def test_where_there_is_no_cluster_nothing_is_started(monkeypatch):
    for name in distributed.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    distributed.start(preemption=False)  # the real thing: these tests have used devices, as a notebook would
    assert jax.config.jax_enable_preemption_service, "what is not started leaves no trace"
    assert not jax.distributed.is_initialized() and distributed.is_first()
    assert distributed.named("error") == "error"


@pytest.mark.parametrize("error", [RuntimeError("address in use\nmore"), ValueError("no pod"), OSError("no metadata")])
def test_what_jax_says_is_told_in_one_line(monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    first = str(error).splitlines()[0]
    with pytest.raises(ConnectionError, match=f"process 1 of 2 could not begin: {first}$"):
        distributed.start(**THREE)
    with pytest.raises(ConnectionError, match=f"this process could not begin: {first}$"):
        distributed.start()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"process_index": None}, "missing: --process_index: a process of several is given --coordinator_address"),
        ({"coordinator_address": None, "process_count": None}, "missing: --coordinator_address, --process_count"),
        ({"coordinator_address": "node001"}, "--coordinator_address: expected HOST:PORT, such as node001:8476, got"),
        ({"coordinator_address": "node001:http"}, "--coordinator_address: expected HOST:PORT"),
        ({"process_count": 0}, "--process_count: expected at least 1, got 0"),
        ({"process_index": 2}, "--process_index: expected 0 to 1, of 2 processes, got 2"),
        ({"process_count": 1, "process_index": 3}, "--process_index: expected 0, of 1 process, got 3"),
        ({"process_index": -1}, "--process_index: expected 0 to 1"),
        ({"timeout": 0}, "--initialization_timeout: expected a whole number of seconds >= 1, got 0"),
    ],
)
def test_refuses(begun, change, text):
    with pytest.raises(ValueError, match=text):
        distributed.start(**THREE | change)
    assert not begun


@pytest.mark.parametrize("environment", [None, SLURM])
def test_a_process_whose_others_do_not_come_says_so_and_ends(monkeypatch, capfd, environment):
    """Ctrl-C ends it before: Python's own handler would wait with it."""
    ended, codes, handlers = threading.Event(), [], []

    def wait(*args, **options):
        handlers.append(signal.getsignal(signal.SIGINT))
        assert ended.wait(60)

    monkeypatch.setattr(jax.distributed, "initialize", wait)
    monkeypatch.setattr(distributed, "SOON", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or ended.set())
    for name in distributed.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGINT)
    distributed.start(**({} if environment else THREE), timeout=1)
    said = capfd.readouterr().err
    assert codes == [2] and handlers == [signal.SIG_DFL] and signal.getsignal(signal.SIGINT) == before
    if environment:
        assert "this process waits for the others, 1 s at most" in said
        assert "JAX read from the environment: SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_PROCID=3." in said
        assert "--process_count=1 to run one process alone" in said
    else:
        assert "process 1 of 2 waits for the others, 1 s at most" in said
        assert "the 2 processes did not all come to the coordinator localhost:8476 within 1 s" in said


def test_the_command_line_passes_them_on_before_anything_else(begun, capsys):
    flags = [f"--{name}={value}" for name, value in THREE.items()]
    for command, noticed in (("train", True), ("evaluate", False)):
        assert main([command, *flags, "--initialization_timeout=7"]) == 2  # no gin file
        assert begun.pop()[0] == tuple(THREE.values())
        assert jax.config.jax_enable_preemption_service is noticed
    assert main(["costs", "--process_index=1"]) == 2
    assert "--process_index: `costs` is done by one process; for train, " in capsys.readouterr().err


def fails():
    raise ZeroDivisionError("of ours")


def left_alone():
    raise jax.errors.JaxRuntimeError(
        "FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]\nmore"
    )


def test_a_process_that_fails_because_another_has_ended_says_so_in_a_line(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit) as end:
        distributed.end(left_alone)
    said = capfd.readouterr().err
    assert end.value.code == 1 and "process 0: error: another process has ended, or can't be reached" in said
    assert (
        "Connection closed by peer" in said
        and "The same command on all hosts goes on from the last whole checkpoint" in said
    )
    assert "Traceback" not in said and said.count("\n") == 1


@pytest.mark.parametrize("main, several, left", [(lambda: 2, 2, True), (fails, 1, True), (lambda: 0, 0, False)])
def test_a_process_that_fails_leaves_the_others_at_once(monkeypatch, capfd, main, several, left):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises((SystemExit, ZeroDivisionError)):
        distributed.end(main)
    assert not codes, "one alone ends as any process does"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit) as end:
        distributed.end(main)
    assert end.value.code == several and codes == [several] * left
    assert ("process 0: error: Traceback" in capfd.readouterr().err) == (main is fails)
