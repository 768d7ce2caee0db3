"""One training step and one evaluation step: pure functions, jitted over a mesh with a donated state."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from synthesizer_jax import activations, sharding
from synthesizer_jax.axes import BATCH, VOCAB
from synthesizer_jax.models import parameters
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, BatchKeys
from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.models.parameters import Declared
from synthesizer_jax.training import cpu
from synthesizer_jax.training.loss import (
    LossSums,
    check_chunks,
    check_loss_settings,
    chunked_cross_entropy,
    cross_entropy,
)
from synthesizer_jax.training.optimizer import Optimizer, declare_state

cpu.run_where_called()  # JAX reads it when it first uses its CPU devices, which a mesh does before a Trainer has it

Batch = Mapping[str, Int[Array, "b *t"]]
Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training run changes, and the parameters that it does not."""

    step: Int[Array, ""]  # updates made
    params: Any  # trained parameters
    fixed: Any  # drawn once, saved, never updated
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model with its optimizer and loss on a mesh: makes states and the functions that move them."""

    config: ModelConfig
    optimizer: Optimizer
    mesh: Mesh
    seed: int = 0  # of initial values and dropout
    z_loss: float = 1e-4  # weight of log(Z)^2, which keeps logits from drifting
    label_smoothing: float = 0.0  # probability given to the other tokens or classes
    microbatches: int = 1  # parts of a batch whose gradients are added up one after the other: less memory
    loss_chunks: int = 1  # parts of the vocabulary that the loss goes through; above 1 the logits are never whole
    rules: sharding.Rules = sharding.Rules()  # where they differ from sharding.RULES

    def __post_init__(self):
        check_loss_settings(self.z_loss, self.label_smoothing)
        count = self.microbatches
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"microbatches: expected a whole number >= 1, got {count!r}")
        if self.config.batch == ENCODER_ONLY:
            if self.loss_chunks != 1:
                raise ValueError(
                    f"loss_chunks: expected 1, as a classifier has no vocabulary of targets, got {self.loss_chunks}"
                )
            return
        vocab_axes = activations.names(self.rules.table[VOCAB])
        shards = math.prod(self.mesh.shape[name] for name in vocab_axes)
        check_chunks(self.loss_chunks, self.config.vocab_size, shards if self.config.vocab_size % shards == 0 else 1)

    def check_batch_size(self, batch_size: int) -> None:
        """ValueError unless the rows divide over the devices that share a batch, and each device's over microbatches."""
        sharding.check_batch_size(self.mesh, batch_size)
        shards = sharding.batch_shards(self.mesh)
        if batch_size % (shards * self.microbatches):
            raise ValueError(
                f"microbatches={self.microbatches}: batch_size={batch_size} does not divide over data x fsdp x microbatches = "
                f"{shards} x {self.microbatches}; use a multiple of {shards * self.microbatches}, or fewer microbatches"
            )

    def declared_state(self) -> TrainState:
        """The shape, dtype and logical axes of everything in the state."""
        trained, fixed = parameters.abstract(self.config)
        opt_state = declare_state(self.optimizer.build(trained), trained)
        return TrainState(Declared((), jnp.int32, ()), trained, fixed, opt_state)

    def abstract_state(self) -> TrainState:
        """The state as jax.ShapeDtypeStructs with shardings. ValueError where a parameter does not fit the mesh."""
        declared = self.declared_state()
        sharding.check_rules(self.rules, declared.params, declared.fixed)
        return sharding.shaped(self.mesh, declared, self.rules)

    def init(self) -> TrainState:
        """The state before the first step, born in its shards."""
        return self.initial_program()(self.seed)

    def initial_program(self) -> "OnMesh":
        """seed -> the state before the first step."""
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

        def init(seed):
            trained, fixed = parameters.init(self.config, jax.random.key(seed))
            return self._start(trained, fixed)

        # LLVM compiles a tiny model's random draws in 2 s at this level, in 11 s at its default; the bits are equal.
        fast = {"xla_backend_optimization_level": 1} if self.mesh.devices.flat[0].platform == "cpu" else {}
        jitted = jax.jit(init, static_argnums=0, out_shardings=placed, compiler_options=fast)
        return OnMesh(jitted, self.mesh, self.rules)

    def init_from(self, trained: Any, fixed: Any) -> TrainState:
        """The state before the first step of training on from given parameters, which it takes over."""
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        with self._placed():
            return jax.jit(self._start, out_shardings=placed, donate_argnums=(0, 1))(trained, fixed)

    def _start(self, trained, fixed):
        return TrainState(jnp.int32(0), trained, fixed, self._transformation().init(trained))

    def train_step(self) -> "OnMesh":
        """(state, batch) -> (state after one update, metrics). The state that goes in is donated and gone.

        Metrics: the sums loss, z_loss, accuracy and weight (divide by weight for means over real targets), of a language
        model nats (- log p of its targets, without z-loss and smoothing), and learning_rate, gradient_norm and
        non_padding_fraction/encoder, /decoder or both.
        """
        transformation, keys = self._transformation(), self.config.batch
        cpu.keep_memory(self.mesh)

        def step(state, batch):
            check_batch(batch, keys)
            self.check_batch_size(batch[keys.targets].shape[0])
            key = jax.random.fold_in(jax.random.key(self.seed), state.step)
            weight = jnp.maximum(jnp.sum(batch[keys.weights].astype(jnp.float32)), 1)

            def objective(trained, part, key):
                sums = self._loss(trained, state.fixed, part, key)
                return sums.total / weight, sums

            def gradients_of(part, key):
                gradients, sums = jax.grad(objective, has_aux=True)(state.params, part, key)
                return self._in_parts(gradients), sums

            gradients, sums = self._over_microbatches(gradients_of, batch, key)
            updates, opt_state = transformation.update(gradients, state.opt_state, state.params)
            params = jax.tree.map(_add, state.params, updates)
            metrics = self._sums(sums) | {
                "z_loss": sums.z_loss,
                "learning_rate": self.optimizer.learning_rate(state.step),
                "gradient_norm": optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients)),
            }
            metrics |= {f"non_padding_fraction/{side}": _fraction(mask) for side, mask in _real(batch).items()}
            return TrainState(state.step + 1, params, state.fixed, opt_state), metrics

        return self._jit(step, donate_argnums=0, with_state=True)

    def _over_microbatches(self, gradients_of, batch, key):
        """The sum of (gradients, sums) over the microbatches, gradients in float32; each has its own dropout.

        They are weighed by the real targets of the whole batch, so that the sum is the gradient of the whole batch, even
        where one microbatch has few targets or none. Each part of the data axis adds up its own; the parts are summed once.
        """
        count = self.microbatches
        if count == 1:
            return gradients_of(batch, key)
        copies = self._copies()
        microbatches = {name: _microbatches(rows, count, copies) for name, rows in batch.items()}

        def add(total, xs):
            index, rows = xs

            def of_rows(rows):
                gradients, sums = gradients_of(rows, jax.random.fold_in(key, index))
                return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums

            more = activations.part_by_part(of_rows, sharding.DATA)(rows) if copies else of_rows(rows)
            return jax.tree.map(jnp.add, total, more), None

        of_each = (copies,) if copies else ()
        zeros = jax.tree.map(lambda p: jnp.zeros((*of_each, *p.shape)), parameters.abstract(self.config)[0])
        sums = LossSums(*[jnp.zeros(of_each)] * len(LossSums._fields))
        total, _ = jax.lax.scan(add, (self._in_parts(zeros, copies), sums), (jnp.arange(count), microbatches))
        if not copies:
            return total
        gradients, sums = jax.tree.map(lambda parts: jnp.sum(parts, axis=0), total)
        return self._in_parts(gradients), sums

    def _copies(self) -> int:
        """How many parts of the data axis have gradients of their own until the last microbatch; 0: there is one set."""
        placed = self._placed_parameters()
        stored = {name for s in jax.tree.leaves(placed) for part in s.spec for name in activations.names(part)}
        parts = self.mesh.shape[sharding.DATA]
        return 0 if parts == 1 or sharding.DATA in stored else parts

    def _in_parts(self, gradients, copies=0):
        """Gradients split as their parameters are stored: what is summed over devices is scattered over them as well."""
        before = (sharding.DATA,) if copies else ()
        return jax.tree.map(
            lambda g, s: jax.lax.with_sharding_constraint(g, PartitionSpec(*before, *s.spec)),
            gradients,
            self._placed_parameters(),
        )

    def _placed_parameters(self):
        return sharding.parameter_shardings(self.mesh, parameters.abstract(self.config)[0], self.rules)

    def eval_step(self) -> "OnMesh":
        """(state, batch) -> the sums loss, accuracy, weight and nats, without dropout, label smoothing and z-loss."""
        keys = self.config.batch

        def step(state, batch):
            check_batch(batch, keys)
            return self._sums(self._loss(state.params, state.fixed, batch, None, z_loss=0.0, label_smoothing=0.0))

        return self._jit(step)

    def _transformation(self) -> optax.GradientTransformation:
        return self.optimizer.build(parameters.abstract(self.config)[0])

    def _loss(self, trained, fixed, batch, key, **settings):
        keys = self.config.batch
        settings = {"z_loss": self.z_loss, "label_smoothing": self.label_smoothing} | settings
        model = parameters.bind(self.config, trained, fixed)
        arguments = {name: batch[name] for name in (*keys.inputs, *keys.packing) if name in batch}
        arguments |= {"dropout_key": key if self.config.dropout_rate > 0 else None}
        targets = (batch[keys.targets], batch[keys.weights])
        if self.loss_chunks == 1:
            return cross_entropy(model(**arguments), *targets, **settings)
        x, table = model.softmax(model(**arguments, as_logits=False))
        return chunked_cross_entropy(x, table, *targets, chunks=self.loss_chunks, **settings)

    def _sums(self, sums: LossSums) -> Metrics:
        metrics = {"loss": sums.total, "accuracy": sums.correct, "weight": sums.weight}
        return metrics | {"nats": sums.nats} if self.config.batch == DECODER_ONLY else metrics

    def _jit(self, step, with_state=False, **options):
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        metrics = sharding.replicated(self.mesh)
        outputs = (placed, metrics) if with_state else metrics
        inputs = (placed, sharding.batch_sharding(self.mesh))
        jitted = jax.jit(step, in_shardings=inputs, out_shardings=outputs, **options)
        return OnMesh(jitted, self.mesh, self.rules)

    def _placed(self):
        return sharding.on(self.mesh, self.rules)


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A jitted function that is always called, and lowered, on its mesh."""

    jitted: Any
    mesh: Mesh
    rules: sharding.Rules

    def __call__(self, *args):
        with sharding.on(self.mesh, self.rules):
            return self.jitted(*args)

    def lower(self, *args) -> jax.stages.Lowered:
        """To compile without arrays: args may be jax.ShapeDtypeStructs."""
        with sharding.on(self.mesh, self.rules):
            return self.jitted.lower(*args)


def check_batch(batch: Mapping[str, Any], keys: BatchKeys = ENCODER_DECODER) -> None:
    """ValueError unless a batch has exactly the arrays that the model reads: a misnamed one would leak contexts."""
    missing = [name for name in keys.required if name not in batch]
    packed = [name for name in keys.packing if name in batch]
    if packed:
        missing += [name for name in keys.packing if name not in batch]
    unknown = sorted(set(batch) - {*keys.required, *keys.packing})
    if missing or unknown:
        packing = f" and, when packed, all of {', '.join(keys.packing)}" if keys.packing else ""
        raise ValueError(
            f"batch: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}; {keys.kind} reads "
            f"{', '.join(keys.required)}{packing}"
        )
    for name in batch:
        if not jnp.issubdtype(batch[name].dtype, jnp.integer) and name != keys.weights:
            raise ValueError(f"batch[{name!r}]: expected whole numbers, got {batch[name].dtype}")


def _microbatches(rows: Int[Array, "b *t"], count: int, copies: int) -> Int[Array, "m ..."]:
    """The rows of a batch in `count` parts, of each device's own rows: nothing moves between devices.

    Where there are copies, the rows of a microbatch are [copies, rows / copies].
    """
    whole = (None,) * (rows.ndim - 1)
    parts = rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1)
    parts = activations.constrain(parts, (None, BATCH, *whole))
    if not copies:
        return parts
    parts = parts.reshape(count, copies, -1, *rows.shape[1:])
    return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, sharding.DATA, sharding.FSDP, *whole))


def _real(batch: Batch) -> dict[str, Array]:
    """Where the tokens of each side are no padding. The decoder's first input is 0, so that its weights say it."""
    said = {"encoder": "encoder_input_tokens", "decoder": "decoder_loss_weights"}
    return {side: batch[name] > 0 for side, name in said.items() if name in batch}


def _add(param, update):
    return (param.astype(jnp.float32) + update.astype(jnp.float32)).astype(param.dtype)


def _fraction(mask):
    return jnp.mean(mask.astype(jnp.float32))
