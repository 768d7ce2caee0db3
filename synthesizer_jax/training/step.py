"""One training step and one evaluation step: pure functions, jitted over a mesh with a donated state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from synthesizer_jax import sharding
from synthesizer_jax.models import parameters
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, BatchKeys
from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.models.parameters import Declared
from synthesizer_jax.training.loss import LossSums, check_loss_settings, cross_entropy
from synthesizer_jax.training.optimizer import Optimizer, declare_state

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

    def __post_init__(self):
        check_loss_settings(self.z_loss, self.label_smoothing)

    def declared_state(self) -> TrainState:
        """The shape, dtype and logical axes of everything in the state."""
        trained, fixed = parameters.abstract(self.config)
        opt_state = declare_state(self.optimizer.build(trained), trained)
        return TrainState(Declared((), jnp.int32, ()), trained, fixed, opt_state)

    def abstract_state(self) -> TrainState:
        """The state as jax.ShapeDtypeStructs with shardings. ValueError where a parameter does not fit the mesh."""
        return sharding.shaped(self.mesh, self.declared_state())

    def init(self) -> TrainState:
        """The state before the first step, born in its shards."""
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())

        def init(seed):
            trained, fixed = parameters.init(self.config, jax.random.key(seed))
            return self._start(trained, fixed)

        # LLVM compiles a tiny model's random draws in 2 s at this level, in 11 s at its default; the bits are equal.
        fast = {"xla_backend_optimization_level": 1} if self.mesh.devices.flat[0].platform == "cpu" else {}
        with jax.set_mesh(self.mesh):
            return jax.jit(init, static_argnums=0, out_shardings=placed, compiler_options=fast)(self.seed)

    def init_from(self, trained: Any, fixed: Any) -> TrainState:
        """The state before the first step of training on from given parameters, which it takes over."""
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        with jax.set_mesh(self.mesh):
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

        def step(state, batch):
            check_batch(batch, keys)
            key = jax.random.fold_in(jax.random.key(self.seed), state.step)
            weight = jnp.maximum(jnp.sum(batch[keys.weights].astype(jnp.float32)), 1)

            def objective(trained):
                sums = self._loss(trained, state.fixed, batch, key)
                return sums.total / weight, sums

            gradients, sums = jax.grad(objective, has_aux=True)(state.params)
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

    def eval_step(self) -> "OnMesh":
        """(state, batch) -> the sums loss, accuracy, weight and nats, without dropout, label smoothing and z-loss."""
        keys = self.config.batch

        def step(state, batch):
            check_batch(batch, keys)
            logits = self._logits(state.params, state.fixed, batch, None)
            return self._sums(cross_entropy(logits, batch[keys.targets], batch[keys.weights]))

        return self._jit(step)

    def _transformation(self) -> optax.GradientTransformation:
        return self.optimizer.build(parameters.abstract(self.config)[0])

    def _loss(self, trained, fixed, batch, key):
        logits = self._logits(trained, fixed, batch, key if self.config.dropout_rate > 0 else None)
        return cross_entropy(
            logits,
            batch[self.config.batch.targets],
            batch[self.config.batch.weights],
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
        )

    def _logits(self, trained, fixed, batch, key):
        model = parameters.bind(self.config, trained, fixed)
        packing = {name: batch[name] for name in self.config.batch.packing if name in batch}
        return model(*(batch[name] for name in self.config.batch.inputs), dropout_key=key, **packing)

    def _sums(self, sums: LossSums) -> Metrics:
        metrics = {"loss": sums.total, "accuracy": sums.correct, "weight": sums.weight}
        return metrics | {"nats": sums.nats} if self.config.batch == DECODER_ONLY else metrics

    def _jit(self, step, with_state=False, **options):
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        metrics = sharding.replicated(self.mesh)
        outputs = (placed, metrics) if with_state else metrics
        inputs = (placed, sharding.batch_sharding(self.mesh))
        return OnMesh(jax.jit(step, in_shardings=inputs, out_shardings=outputs, **options), self.mesh)


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A jitted function that is always called, and lowered, with its mesh set."""

    jitted: Any
    mesh: Mesh

    def __call__(self, *args):
        with jax.set_mesh(self.mesh):
            return self.jitted(*args)

    def lower(self, *args) -> jax.stages.Lowered:
        """To compile without arrays: args may be jax.ShapeDtypeStructs."""
        with jax.set_mesh(self.mesh):
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


def _real(batch: Batch) -> dict[str, Array]:
    """Where the tokens of each side are no padding. The decoder's first input is 0, so that its weights say it."""
    said = {"encoder": "encoder_input_tokens", "decoder": "decoder_loss_weights"}
    return {side: batch[name] > 0 for side, name in said.items() if name in batch}


def _add(param, update):
    return (param.astype(jnp.float32) + update.astype(jnp.float32)).astype(param.dtype)


def _fraction(mask):
    return jnp.mean(mask.astype(jnp.float32))
