"""How one process of several begins: they find one another before any device is touched.

JAX does it (jax.distributed), and finds out by itself, on TPU pods, under SLURM's srun, Open MPI's mpirun and on GKE, who
coordinates and which process this is. Elsewhere three flags say so. A laptop has neither: nothing is started there, and no
network is touched.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

TIMEOUT = 300  # seconds
SOON = 10  # seconds of waiting after which a process says that it waits
GRACE = 60  # seconds that JAX is given beyond our timeout, because its own end is an abort with a stack trace
FAILED = 2  # exit code

# In the errors of collectives and of JAX's coordinator where another process is gone.
_OF_OTHERS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "timed out with key",
    "heartbeat",
    "UNAVAILABLE",
    "task failed",
)

# What JAX reads, for messages.
ENVIRONMENT = (
    "JAX_COORDINATOR_ADDRESS",
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "JOB_COMPLETION_INDEX",
)


def start(
    coordinator_address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
    timeout: int = TIMEOUT,
    preemption: bool = True,
) -> None:
    """Waits for all processes of the run. Does nothing for one alone, or where jax.distributed has been started.

    Args:
      coordinator_address: HOST:PORT of process 0, which listens there; None: as JAX finds it in the environment.
      process_count: how many there are; 1: this one is alone, whatever the environment says.
      process_index: which one this is, from 0.
      timeout: seconds to wait for the others. After that the process says which it is, and whom it waited for, and ends
        with exit code 2: JAX can't be called back.
      preemption: whether SIGTERM is a notice to `train`, which all processes agree to follow, or ends the process.

    Raises: ValueError where an argument is wrong or one of the three is missing; ConnectionError with JAX's reason.
    """
    if process_count == 1 and process_index not in (None, 0):
        raise ValueError(f"--process_index: expected 0, of 1 process, got {process_index}; is --process_count right?")
    if process_count == 1 or jax.distributed.is_initialized():
        return
    given = {"coordinator_address": coordinator_address, "process_count": process_count, "process_index": process_index}
    explicit = any(value is not None for value in given.values())
    _check_timeout(timeout)
    if explicit:
        _check(given)
        who = f"process {process_index} of {process_count}"
        whom = (
            f"the {process_count} processes did not all come to the coordinator {coordinator_address}",
            f"Is each of them started, with this --coordinator_address and --process_count={process_count} and an index of "
            f"its own, and can this host reach {coordinator_address}, where process 0 listens?",
        )
    else:
        found = " ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ)
        who = "this process"
        whom = (
            "the processes of this run did not all come to their coordinator",
            f"JAX read from the environment: {found or 'the metadata of this machine'}. Is each of them started? Give "
            "--process_count=1 to run one process alone, or --coordinator_address, --process_count and --process_index.",
        )
    before = jax.config.jax_enable_preemption_service
    jax.config.update("jax_enable_preemption_service", preemption)
    try:
        with _patience(who, *whom, timeout):
            jax.distributed.initialize(
                coordinator_address,
                process_count,
                process_index,
                cluster_detection_method="deactivate" if explicit else None,
                initialization_timeout=timeout + GRACE,
            )
    except Exception as error:  # whatever JAX, a metadata server or Kubernetes says
        jax.config.update("jax_enable_preemption_service", before)
        if not explicit and _is_alone(error):
            return
        advice = f"; is the port of {coordinator_address} taken?" if "RPC server" in str(error) else ""
        raise ConnectionError(f"{who} could not begin: {_first_line(error)}{advice}") from error


def _is_alone(error: Exception) -> bool:
    """No cluster was found, or a caller of ours has used devices before: a notebook, a test."""
    return "coordinator_address should be defined" in str(error) or "must be called before" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check_timeout(timeout: int) -> None:
    if not isinstance(timeout, int) or timeout < 1:
        raise ValueError(f"--initialization_timeout: expected a whole number of seconds >= 1, got {timeout!r}")


def _check(given: dict[str, str | int | None]) -> None:
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"missing: {', '.join(missing)}: a process of several is given --coordinator_address=HOST:PORT, "
            "--process_count=N and --process_index=I, from 0 to N - 1; one alone none of them"
        )
    address, count, index = given.values()
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator_address: expected HOST:PORT, such as node001:8476, got {address!r}")
    if count < 1:
        raise ValueError(f"--process_count: expected at least 1, got {count}")
    if not 0 <= index < count:
        raise ValueError(f"--process_index: expected 0 to {count - 1}, of {count} processes, got {index}")


@contextlib.contextmanager
def _patience(who: str, whom: str, advice: str, timeout: int) -> Iterator[None]:
    """Says after a while that this process waits, and ends it when its time is over."""
    come = threading.Event()

    def watch():
        if come.wait(min(SOON, timeout)):
            return
        print(f"{who} waits for the others, {timeout} s at most", file=sys.stderr, flush=True)
        if not come.wait(timeout - min(SOON, timeout)):
            print(
                f"error: {who}: {whom} within {timeout} s. {advice} --initialization_timeout=SECONDS waits longer.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(FAILED)

    threading.Thread(target=watch, name="patience", daemon=True).start()
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if main else None  # Python's would only come after the wait
    try:
        yield
    finally:
        come.set()
        if main:
            signal.signal(signal.SIGINT, before)


def end(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code that `main` returns, or 1 and a traceback.

    A process that fails while others wait for it in a collective leaves them at once, and they soon fail, too. At an
    ordinary end JAX would wait for them first, up to five minutes. Those that fail for this reason say so in a line.
    """
    try:
        code = main()
    except Exception as error:
        if not _is_one_of_several():
            raise
        print(named("error:"), _about_another(error) or traceback.format_exc(), file=sys.stderr)
        code = 1
    if code and _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _about_another(error: Exception) -> str:
    """What to say where a process fails because another one has; "" where it is a fault of its own."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or not any(sign in str(error) for sign in _OF_OTHERS):
        return ""
    return (
        f"another process has ended, or can't be reached, and its own output says why: {_first_line(error)[:300]}. The same "
        "command on all hosts goes on from the last whole checkpoint"
    )


def _is_one_of_several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes files and tells the user. Touches no device where it is alone."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def named(text: str) -> str:
    """The text, with the process that says it where there are several."""
    if _is_one_of_several():
        return f"process {jax.process_index()}: {text}"
    return text
