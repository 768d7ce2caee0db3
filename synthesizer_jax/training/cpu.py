"""Steps on CPUs: in the thread that asks for them, and in memory that the process keeps.

XLA allocates the temporaries of a program at each call and frees them after it. By default glibc gives so large a block back
to the kernel, which has to clear each of its pages again: in a step of the mini model of `benchmarks/train_step.py`, 75,000
page faults and a tenth of the time. glibc can keep a block in the main thread's arena, whereas those of other threads end at
64 MiB. JAX runs CPU programs in threads of its own, but for two requests: that it should not, and one device alone.
"""

import ctypes
import functools
import os
import platform

import jax

_OPTION = "jax_cpu_enable_async_dispatch"

# glibc's mallopt: numbers of its malloc.h, and the values that mean "never".
_TRIM_THRESHOLD, _NEVER = -1, -1  # free memory at the end of the heap is not given back
_MMAP_MAX, _NONE = -4, 0  # blocks that are mapped, and unmapped, one by one

# With these the user has said how malloc is to behave.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def run_where_called() -> None:
    """Programs on CPUs from now on run in the thread that calls them, which waits, unless the environment says otherwise.

    Of no effect once JAX has used its CPU devices. JAX_CPU_ENABLE_ASYNC_DISPATCH=1 keeps JAX's default.
    """
    if _OPTION.upper() not in os.environ and _OPTION in jax.config.values:  # a later JAX may have dropped it
        jax.config.update(_OPTION, False)


def keep_memory(mesh: jax.sharding.Mesh) -> bool:
    """Where this process has one device of the mesh, a CPU, asks glibc to keep freed memory; whether it was asked.

    It is left alone where an environment variable of malloc's (MALLOC_*_, glibc.malloc in GLIBC_TUNABLES) is set, and there is
    nothing to ask where the C library is another one (macOS, musl). The process stays as large as it ever was.
    """
    return [device.platform for device in mesh.local_devices] == ["cpu"] and _ask()


@functools.cache
def _ask():
    chosen = [name for name in _CHOSEN if name in os.environ]
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, _NONE)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
