"""Does a configuration compile for a TPU slice, does it fit, and what does it move? Answered on any machine by libtpu.

The training, evaluation and decoding steps are those that `train`, `evaluate` and `infer` run, compiled for described devices
from shapes alone: nothing is allocated or computed. Numbers are of one device and one step, unless they say otherwise.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax import sharding
from synthesizer_jax.analysis import traffic
from synthesizer_jax.analysis.collectives import Collective, collectives, summarize
from synthesizer_jax.analysis.costs import costs
from synthesizer_jax.analysis.hlo import Module
from synthesizer_jax.analysis.topologies import Topology, topology
from synthesizer_jax.models import ModelConfig, count_parameters
from synthesizer_jax.prediction import Predictor
from synthesizer_jax.sharding import MeshShape, Rules
from synthesizer_jax.training.optimizer import Optimizer
from synthesizer_jax.training.step import Trainer

TRAIN, EVAL, DECODE = STEPS = ("train", "eval", "decode")
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a device at a step's peak."""

    parameters: int
    optimizer: int
    batch: int
    arguments: int  # these three as the compiler lays them out, in whole tiles, without what a step does not read
    results: int  # that do not take the place of an argument
    temporaries: int  # activations, gradients and all else that a step makes and drops, at their peak
    program: int

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step."""

    name: str
    memory: Memory
    compile_seconds: float
    flops: int  # of the compiled program's matrix products on all devices, recomputation and loops' trips included
    xla_flops: float  # the compiler's own count, of one device: elementwise operations too, but loops once
    model_flops: int | None  # of the model, over the whole batch; None for decoding
    memory_bytes: int  # read from and written to main memory
    collectives: tuple[Collective, ...]
    largest: tuple[str, ...]  # arrays in main memory, the largest first


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A step that the compiler refuses, because a device's memory does not hold it."""

    name: str
    compile_seconds: float
    needs: int | None  # bytes, at least, where the compiler says it: it may have stopped at the temporaries
    message: str  # the compiler's


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What `compile` found."""

    topology: Topology
    mesh: Mapping[str, int]
    batch_size: int
    lengths: Mapping[str, int]
    parameters: int  # of the whole model
    steps: tuple[Step | TooLarge, ...]

    def fits(self, step: Step | TooLarge) -> bool:
        """Whether a device holds it: the compiler refuses what does not fit. For a CPU it is not known."""
        return isinstance(step, Step)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        usable, devices = self.topology.usable_bytes, len(self.topology.devices)
        return {
            "topology": self.topology.name,
            "slices": self.topology.slices,
            "chips": self.topology.chips,
            "devices": devices,
            "memory_bytes_of_a_device": usable,
            "mesh": dict(self.mesh),
            "batch_size": self.batch_size,
            "task_feature_lengths": dict(self.lengths),
            "parameters": self.parameters,
            "steps": {step.name: self._step_as_dict(step) for step in self.steps},
        }

    def _step_as_dict(self, step):
        found = {"fits": self.fits(step)} | dataclasses.asdict(step)
        del found["name"]
        if isinstance(step, Step):
            found["memory"]["total"] = step.memory.total
            found["summary"] = [dataclasses.asdict(row) for row in summarize(step.collectives)]
        return found

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def as_markdown(self) -> str:
        """Tables for a terminal and for documents."""
        return "\n".join(_markdown(self))


def report(
    *,
    model: ModelConfig,
    optimizer: Optimizer,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    topology: str,
    slices: int = 1,
    steps: Sequence[str] = STEPS,
    pack: bool = True,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    mesh: MeshShape | None = None,
    rules: Rules | None = None,
    microbatches: int = 1,
    loss_chunks: int = 1,
) -> Compiled:
    """Compiles the steps of a training run, and what evaluation runs of it, for a topology.

    Args:
      model, optimizer, task_feature_lengths, batch_size, pack, z_loss, label_smoothing, mesh, rules, microbatches,
        loss_chunks: as `train` takes them.
      topology: GENERATION:SIZES of a TPU slice in chips, such as v5e:4x4 or v4:4x4x8, or cpu:COUNT.
      slices: how many of them.
      steps: which of "train", "eval" and "decode".

    Raises: ValueError where an argument is wrong or does not fit the mesh; ImportError where libtpu is missing.
    """
    described, on_mesh = _place(topology, slices, mesh, batch_size)
    _check_steps(steps)
    in_parts = {"microbatches": microbatches, "loss_chunks": loss_chunks, "rules": rules or Rules()}
    trainer = Trainer(model, optimizer, on_mesh, z_loss=z_loss, label_smoothing=label_smoothing, **in_parts)
    trainer.check_batch_size(batch_size)
    programs = {
        TRAIN: lambda: trainer.train_step().lower(
            trainer.abstract_state(), _batch(model, batch_size, task_feature_lengths, pack)
        ),
        EVAL: lambda: trainer.eval_step().lower(
            trainer.abstract_state(), _batch(model, batch_size, task_feature_lengths, False)
        ),
        DECODE: lambda: _predictor(trainer, batch_size, task_feature_lengths).lower(),
    }
    compiled = [_compile(name, programs[name], trainer, batch_size, task_feature_lengths) for name in steps]
    return Compiled(
        described, dict(on_mesh.shape), batch_size, task_feature_lengths, count_parameters(model), tuple(compiled)
    )


def preflight(arguments: Mapping[str, Any]) -> list[str]:
    """For the command `compile`: what would be compiled, for which devices."""
    a = arguments
    described, mesh = _place(a["topology"], a["slices"], a["mesh"], a["batch_size"])
    _check_steps(a["steps"])
    in_parts = {name: a[name] for name in ("z_loss", "label_smoothing", "microbatches", "loss_chunks")}
    trainer = Trainer(a["model"], a["optimizer"], mesh, rules=a["rules"] or Rules(), **in_parts)
    trainer.check_batch_size(a["batch_size"])
    trainer.abstract_state()
    return [f"steps: {', '.join(a['steps'])}", f"devices: {described}, {_mesh(mesh.shape)}"]


def _place(name, slices, mesh, batch_size) -> tuple[Topology, jax.sharding.Mesh]:
    described = topology(name, slices)
    on_mesh = (mesh or MeshShape()).build(described.devices)
    sharding.check_batch_size(on_mesh, batch_size)
    return described, on_mesh


def _check_steps(steps: Sequence[str]) -> None:
    unknown = [step for step in steps if step not in STEPS]
    if unknown or not steps:
        raise ValueError(f"steps: expected some of {', '.join(STEPS)}, got {', '.join(map(str, unknown)) or 'none'}")


def _batch(model, batch_size, lengths, packed):
    shapes = model.batch.shapes(batch_size, lengths, packed and bool(model.batch.packing))
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


def _predictor(trainer, batch_size, lengths):
    state = trainer.abstract_state()
    options = {"batch_size": batch_size, "lengths": lengths, "eos_id": 1, "rules": trainer.rules}
    classes = getattr(trainer.config, "num_classes", trainer.config.vocab_size)
    return Predictor(trainer.config, state.params, state.fixed, trainer.mesh, vocab_size=classes, **options)


# One step


def _compile(name, lower: Callable[[], jax.stages.Lowered], trainer, batch_size, lengths) -> Step | TooLarge:
    lowered = lower()
    on_cpu = trainer.mesh.devices.flat[0].platform == "cpu"
    fast = {"xla_backend_optimization_level": 0} if on_cpu else None  # LLVM's part, which changes none of what is told
    start = time.perf_counter()
    try:
        compiled = lowered.compile(fast)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return TooLarge(name, time.perf_counter() - start, needed_bytes(str(error)), str(error))
    seconds = time.perf_counter() - start
    module = Module.parse(compiled.as_text())
    program = traffic.executed(module)
    found = costs(trainer.config, lengths.get("inputs", 0), lengths.get("targets", 0)) if name != DECODE else None
    per_row = {TRAIN: lambda: found.training_flops, EVAL: lambda: found.flops, DECODE: lambda: None}[name]()
    return Step(
        name,
        _memory(compiled, lowered, name, trainer),
        seconds,
        traffic.matrix_flops(module, program) * trainer.mesh.size,
        (compiled.cost_analysis() or {}).get("flops", 0.0),
        per_row and per_row * batch_size,
        traffic.memory_bytes(module, program),
        tuple(collectives(module, program, dict(trainer.mesh.shape))),
        tuple(_largest(program)),
    )


def _memory(compiled, lowered, name, trainer) -> Memory:
    stats, state = compiled.memory_analysis(), trainer.abstract_state()
    kept = _shard_bytes((state.params, state.fixed))
    moments = _shard_bytes(state.opt_state) if name == TRAIN else 0
    shards = sharding.batch_shards(trainer.mesh)
    rows = lowered.args_info[0][-1]  # of every step, the batch comes last
    batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows)) // shards
    return Memory(
        parameters=kept,
        optimizer=moments,
        batch=batch,
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        program=stats.generated_code_size_in_bytes,
    )


def _shard_bytes(tree: Any) -> int:
    """Of a device's part of arrays that need not exist."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def needed_bytes(message: str) -> int | None:
    """How much memory a program would need, from the compiler's refusal; None where it does not say."""
    said = [
        r"Used ([\d.]+)([BKMGT]) of [\d.]+[BKMGT] hbm",
        r"total memory required for .*? \(([\d.]+)([BKMGT])\) exceeds",
    ]
    for pattern in said:
        if found := re.search(pattern, message):
            return round(float(found[1]) * _UNITS[found[2]])
    return None


def _largest(program: traffic.Executed, count: int = 5) -> Iterator[str]:
    """The largest arrays that stand in main memory, with the origin of each: one for each shape."""
    sizes: dict[str, tuple[int, str]] = {}
    for _, instruction, _ in program:
        if instruction.opcode not in traffic.FREE:
            for array in instruction.results:
                if array.space == 0:
                    sizes.setdefault(str(array), (0, ""))
                    sizes[str(array)] = max(sizes[str(array)], (array.padded_bytes, instruction.op_name))
    for shape, (size, origin) in sorted(sizes.items(), key=lambda item: -item[1][0])[:count]:
        yield f"{shape} {_bytes(size)} {origin.rpartition('closed_call/')[2]}".strip()


# Tables


def _markdown(found: Compiled) -> Iterator[str]:
    lengths = ", ".join(f"{length} {feature}" for feature, length in found.lengths.items())
    device = "device" if found.topology.per_chip == 1 else f"device ({found.topology.per_chip} on a chip)"
    yield f"{found.parameters:,} parameters for {found.topology}, {_mesh(found.mesh)}, batch {found.batch_size} x {lengths}"
    yield ""
    yield f"| of a {device} | " + " | ".join(step.name for step in found.steps) + " |"
    yield "| --- |" + " ---: |" * len(found.steps)
    for label, cell in _ROWS:
        cells = [cell(found, step) if isinstance(step, Step) else "-" for step in found.steps]
        yield f"| {label} | {' | '.join(cells)} |"
    yield f"| fits | {' | '.join(_fits(found, step) for step in found.steps)} |"
    yield f"| compiled in | {' | '.join(f'{step.compile_seconds:.0f} s' for step in found.steps)} |"
    yield ""
    yield from _collectives_markdown(found)


def _memory_row(field: str) -> Callable[[Compiled, Step], str]:
    return lambda found, step: _bytes(getattr(step.memory, field))


_ROWS: tuple[tuple[str, Callable[[Compiled, Step], str]], ...] = (
    ("parameters", _memory_row("parameters")),
    ("optimizer state", _memory_row("optimizer")),
    ("batch", _memory_row("batch")),
    ("these as they lie in memory", _memory_row("arguments")),
    ("new results", _memory_row("results")),
    ("temporaries at their peak", _memory_row("temporaries")),
    ("program", _memory_row("program")),
    ("memory in all", _memory_row("total")),
    ("memory read and written", lambda found, step: _bytes(step.memory_bytes)),
    ("sent to other devices", lambda found, step: _bytes(sum(one.sent for one in step.collectives))),
    ("FLOPs, all devices", lambda found, step: _count(step.flops)),
    ("model FLOPs", lambda found, step: "-" if step.model_flops is None else _count(step.model_flops)),
    ("their ratio", lambda found, step: "-" if step.model_flops is None else f"{step.model_flops / step.flops:.0%}"),
)


def _fits(found: Compiled, step: Step | TooLarge) -> str:
    usable = found.topology.usable_bytes
    if isinstance(step, TooLarge):
        needs = "" if step.needs is None else f": needs at least {_bytes(step.needs)} of {_bytes(usable)}"
        return f"does not fit{needs}"
    if usable is None:
        return "not known"
    return f"{step.memory.total / usable:.0%} of {_bytes(usable)}"


def _collectives_markdown(found: Compiled) -> Iterator[str]:
    rows = [(step.name, row) for step in found.steps if isinstance(step, Step) for row in summarize(step.collectives)]
    if not rows:
        yield "No collectives."
        return
    yield "| step | collective | over | times | bytes | sent by a device | largest array |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- |"
    for step, row in rows:
        yield (
            f"| {step} | {row.kind} | {row.axes} | {row.count} | {_bytes(row.bytes)} | {_bytes(row.sent)} | "
            f"{row.largest} |"
        )


def _mesh(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.items())


def _bytes(size: int) -> str:
    unit, scale = max((pair for pair in _UNITS.items() if size >= pair[1]), key=lambda pair: pair[1], default=("B", 1))
    return f"{size} B" if unit == "B" else f"{size / scale:,.2f} {unit}iB"


def _count(number: int) -> str:
    unit, scale = next((pair for pair in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if number >= pair[1]), ("", 1))
    return f"{number / scale:,.2f} {unit}".strip()
