"""Devices that are not here, to compile for: the chips of a TPU slice, or CPUs.

libtpu compiles for a described slice on any machine; no TPU is touched, looked for or needed.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies

_GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """A kind of TPU chip. JAX sees one device or two on a chip, each with its own part of the memory."""

    devices: int  # on a chip
    memory: int  # GiB of HBM of a device, as Google's documentation of the generation has it
    usable: float  # GiB of it that the compiler gives to a program: "available HBM" in its own message
    largest: int  # chips of the largest slice
    axes: int  # of its torus
    options: tuple[tuple[str, str], ...] = ()  # for libtpu

    @property
    def usable_bytes(self) -> int:
        return round(self.usable * _GiB)


# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of each generation.
GENERATIONS = {
    "v2": Generation(2, 8, 7.48, 256, 2),
    "v3": Generation(2, 16, 15.48, 1024, 2),
    "v4": Generation(1, 32, 30.75, 4096, 3, (("chip_config_name", "megacore"),)),  # else libtpu has two devices a chip
    "v5e": Generation(1, 16, 15.75, 256, 2),
    "v5p": Generation(1, 96, 95.74, 8960, 3),
    "v6e": Generation(1, 32, 31.25, 256, 2),
    "tpu7x": Generation(2, 96, 94.75, 9216, 3),
}
EXAMPLES = "v5e:4x4, v4:4x4x4, v3:2x2, cpu:8"

_ACCELERATOR_TYPES = (
    "; of an accelerator type, the number is that of chips (v5litepod-16 is v5e:4x4) or of cores, two on a chip (v4-32 is "
    "v4:2x2x4)"
)
_MOST_CPUS = 1024  # each is made, with its threads; 100,000 fill 20 GB

_ENVIRONMENT = {  # libtpu looks for the machine that it runs on, and tells at length that it finds none
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Described devices."""

    name: str
    slices: int
    devices: tuple[jax.Device, ...]
    chips: int  # of all slices
    usable_bytes: int | None  # of a device's memory; None: not known

    @property
    def per_chip(self) -> int:
        """Devices on a chip."""
        return len(self.devices) // self.chips

    def __str__(self):
        kind = "CPU" if self.name.startswith("cpu") else "chip"
        many = f"{self.slices} slices of " if self.slices > 1 else ""
        devices = f", {len(self.devices)} devices" if len(self.devices) != self.chips else ""
        return f"{many}{self.name} ({self.chips} {kind}{'s' * (self.chips > 1)}{devices})"


def topology(name: str, slices: int = 1) -> Topology:
    """The devices of `slices` slices that are each called `name`, such as v5e:4x4 (4 x 4 chips) or cpu:8.

    Raises: ValueError where there is no such slice; ImportError, with what to install, where libtpu is missing.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    if not found:
        advice = _ACCELERATOR_TYPES if "-" in name else ""
        raise ValueError(f"topology: expected GENERATION:SIZES, such as {EXAMPLES}, got {name!r}{advice}")
    kind, sizes = found[1].lower(), [int(size) for size in found[2].split("x")]
    if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
        raise ValueError(f"slices: expected a whole number >= 1, got {slices!r}")
    if kind == "cpu":
        if slices > 1 or len(sizes) > 1:
            raise ValueError(f"topology: CPUs are counted, as in cpu:8, and have no slices, got {slices} of {name!r}")
        if not 1 <= sizes[0] <= _MOST_CPUS:
            raise ValueError(f"topology: expected 1 to {_MOST_CPUS} CPU devices, got {name!r}")
        return Topology(name, 1, _cpus(sizes[0]), sizes[0], None)
    if kind not in GENERATIONS:
        raise ValueError(
            f"topology: no TPU generation {kind!r}; known: {', '.join(GENERATIONS)}, and cpu; e.g. {EXAMPLES}"
        )
    generation, chips = GENERATIONS[kind], math.prod(sizes)
    if not 2 <= len(sizes) <= generation.axes or 0 in sizes:
        example = "x".join(["4"] * generation.axes)
        raise ValueError(f"topology: {kind} has {generation.axes} axes, as in {kind}:{example}, got {name!r}")
    if chips > generation.largest:
        raise ValueError(
            f"topology: {name} would have {chips:,} chips, but a slice of {kind} has at most {generation.largest:,}; "
            "several slices: --slices"
        )
    devices = _described(f"{kind}:{found[2]}", sizes, slices, dict(generation.options))
    return Topology(name, slices, devices, slices * chips, generation.usable_bytes)


def _described(name: str, sizes: list[int], slices: int, options: dict[str, str]) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "topology: compiling for TPU needs libtpu, which works on any Linux machine: "
            "pip install 'synthesizer_jax[tpu]'; cpu:8 works without"
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if max(sizes) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology: libtpu knows no {name}: {str(error).splitlines()[0]}") from error


def _cpus(count: int) -> tuple[jax.Device, ...]:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # this process has its CPU devices already
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise ValueError(f"topology: expected at most {len(found)} CPU devices in this process, got cpu:{count}")
    return tuple(found[:count])
