"""What defines a model: a frozen configuration of each kind, presets, and the JSON form."""

import abc
import dataclasses
import json
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp

from synthesizer_jax import mixers, scores
from synthesizer_jax.mixers import Mixer, Sparse, synthesizer
from synthesizer_jax.models.batch import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, BatchKeys
from synthesizer_jax.nn.attention import as_mixer, check_rate
from synthesizer_jax.nn.layers import Activation
from synthesizer_jax.scores import DotProduct, Spec
from synthesizer_jax.scores.base import check_positive, subclasses

Remat = Literal["none", "full", "dots", "attention"]
DType = Literal["float32", "bfloat16"]
Pooling = Literal["mean", "first"]

T5_VOCAB_SIZE = 32_128  # 32,000 pieces and 100 sentinels, padded to a multiple of 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """What every kind of model has: T5's layers over exchangeable self-attention."""

    batch: ClassVar[BatchKeys]  # what a batch is made of

    vocab_size: int  # rows of the embedding; a tokenizer may use fewer
    features: int  # e
    mlp_features: int  # m
    heads: int  # h, of self-attention
    head_dim: int  # d, of self-attention
    mlp_activation: Activation  # "relu" in T5 v1.0, "gated-gelu" in v1.1
    # T5's relative position bias, one table per stack, none in cross-attention; only where the mixer has scores.
    relative_bias: bool = True
    relative_buckets: int = 32
    relative_max_distance: int = 128
    # Rows of a trained table of positions that is added to the embeddings, the same for encoder and decoder; None: none, as
    # in T5. A longer sequence is an error. The T5-scale comparison of convolutions, which have no relative bias: 512.
    learned_positions: int | None = None
    dropout_rate: float = 0.1  # of embeddings, sub-layers, attention weights and the MLP's hidden layer
    dtype: DType = "float32"  # of the computation; softmax, norms' statistics and logits are float32 in any case
    param_dtype: DType = "float32"
    scan_layers: bool = True  # one compiled layer for all of a stack, parameters stacked along a leading axis
    # What the backward pass computes again. "none": nothing; "full": each layer from its input; "dots": all but products with
    # parameters; "attention": all but what comes out of attention, a layer's input and one or two arrays of its size.
    remat: Remat = "none"

    def __post_init__(self):
        for name in ("vocab_size", "features", "mlp_features", "heads", "head_dim"):
            check_positive(name, getattr(self, name))
        for name in ("relative_buckets", "relative_max_distance"):
            check_positive(name, getattr(self, name))
        if self.learned_positions is not None:
            check_positive("learned_positions", self.learned_positions)
        check_rate("dropout_rate", self.dropout_rate)
        _check_choice("mlp_activation", self.mlp_activation, get_args(Activation))
        _check_choice("remat", self.remat, get_args(Remat))
        for name in ("dtype", "param_dtype"):
            _check_choice(name, getattr(self, name), get_args(DType), "; T5's activations overflow float16")
        for name in ("relative_bias", "scan_layers"):
            _check_flag(name, getattr(self, name))
        self._check()

    @abc.abstractmethod
    def _check(self) -> None:
        """Raises ValueError where a field of this kind of model is wrong."""

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def _check_stack(self, name: str, causal: bool) -> None:
        check_positive(f"{name}_layers", getattr(self, f"{name}_layers"))
        attention = f"{name}_attention"
        check_mixer(attention, getattr(self, attention), getattr(self, f"{name}_layers"), self.scan_layers, causal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """A T5-style encoder-decoder whose self-attention is exchangeable."""

    batch: ClassVar[BatchKeys] = ENCODER_DECODER

    encoder_layers: int
    decoder_layers: int
    encoder_attention: Spec | Mixer
    decoder_attention: Spec | Mixer
    tied_embedding: bool  # True: logits from the input embedding, scaled by e^-0.5 (v1.0); False: own matrix (v1.1)
    cross_heads: int | None = None  # of cross-attention; None: as self-attention
    cross_head_dim: int | None = None

    def _check(self):
        self._check_stack("encoder", causal=False)
        self._check_stack("decoder", causal=True)
        for name in ("cross_heads", "cross_head_dim"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        _check_flag("tied_embedding", self.tied_embedding)

    @property
    def cross_dims(self) -> tuple[int, int]:
        """(heads, head_dim) of cross-attention."""
        return self.cross_heads or self.heads, self.cross_head_dim or self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig(ModelConfig):
    """A language model: one stack of causal layers."""

    batch: ClassVar[BatchKeys] = DECODER_ONLY

    decoder_layers: int
    decoder_attention: Spec | Mixer
    tied_embedding: bool  # True: logits from the input embedding, scaled by e^-0.5; False: own matrix

    def _check(self):
        self._check_stack("decoder", causal=True)
        _check_flag("tied_embedding", self.tied_embedding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOnlyConfig(ModelConfig):
    """A classifier of whole sequences: an encoder, one vector out of its tokens, and logits of the classes."""

    batch: ClassVar[BatchKeys] = ENCODER_ONLY

    encoder_layers: int
    encoder_attention: Spec | Mixer
    num_classes: int
    pooling: Pooling = "mean"  # over the real tokens; "first": the first token's vector

    def _check(self):
        self._check_stack("encoder", causal=False)
        check_positive("num_classes", self.num_classes)
        if self.num_classes < 2:
            raise ValueError(f"num_classes: expected at least 2, got {self.num_classes}")
        _check_choice("pooling", self.pooling, get_args(Pooling))


KINDS = (EncoderDecoderConfig, DecoderOnlyConfig, EncoderOnlyConfig)


def check_mixer(name: str, mixer: Any, layers: int, scan: bool, causal: bool = False) -> None:
    """Refuse what is no mixer, is made for another number of layers, or can't stand in a decoder."""
    if not isinstance(mixer, Spec | Mixer):
        raise ValueError(
            f'{name}: expected scores such as synthesizer("R+V", max_length=512), or a mixer such as '
            f"MultiHead(DotProduct()), got {mixer!r}"
        )
    mixer = as_mixer(mixer)
    try:
        different = len({mixer.of_layer(layer, layers) for layer in range(layers)}) > 1
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if different and scan:
        raise ValueError(
            f"{name}: {type(mixer).__name__} differs from layer to layer, so that one compiled layer can't serve all; "
            "set scan_layers=False"
        )
    if causal and mixer.decoder_error():
        raise ValueError(
            f"{name}: {mixer.decoder_error()}; encoder_attention and decoder_attention may differ, in gin as in "
            "attention/Linformer_encoder.gin"
        )


def _check_choice(name, value, choices, why=""):
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}{why}")


def _check_flag(name, value):
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


# Presets. attention: the paper's letters, scores or a mixer, for every stack; max_length: n of its synthetic parts;
# overrides: any field of the configuration.


def _preset(kind: type[ModelConfig], attention, max_length, sizes, overrides) -> ModelConfig:
    known = {field.name: None for field in dataclasses.fields(kind)}
    spec = synthesizer(attention, max_length)
    stacks = {name: spec for name in ("encoder_attention", "decoder_attention") if name in known}
    fields = {"vocab_size": T5_VOCAB_SIZE} | stacks | sizes | overrides
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(
            f"overrides: {', '.join(map(_with_kind, unknown))} is no field of the configuration; expected some of "
            f"{', '.join(known)} ({kind.__name__})"
        )
    return kind(**fields)


def _with_kind(name: str) -> str:
    """cross_heads (of EncoderDecoderConfig): a field that another kind of model has."""
    owners = [kind.__name__ for kind in KINDS if name in {field.name for field in dataclasses.fields(kind)}]
    return f"{name} (of {' and '.join(owners)})" if owners else name


def _t5(attention, max_length, sizes, overrides) -> EncoderDecoderConfig:
    return _preset(EncoderDecoderConfig, attention, max_length, sizes, overrides)


def _v1_0(features, mlp_features, heads, head_dim, layers):
    return {
        "features": features,
        "mlp_features": mlp_features,
        "heads": heads,
        "head_dim": head_dim,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "mlp_activation": "relu",
        "tied_embedding": True,
    }


def _v1_1(features, mlp_features, heads, head_dim, layers):
    return _v1_0(features, mlp_features, heads, head_dim, layers) | {
        "mlp_activation": "gated-gelu",
        "tied_embedding": False,
        "dropout_rate": 0.0,  # as in pretraining; fine-tune with 0.1
    }


def t5_tiny(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 shapes at a size for laptops and tests: 2+2 layers, 128/512, 4 heads."""
    return _t5(attention, max_length, _v1_0(128, 512, 4, 32, 2), overrides)


def t5_small(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 small: 6+6 layers, 512/2048, 8 heads of 64; 60M parameters."""
    return _t5(attention, max_length, _v1_0(512, 2048, 8, 64, 6), overrides)


def t5_base(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 base: 12+12 layers, 768/3072, 12 heads of 64; 223M parameters."""
    return _t5(attention, max_length, _v1_0(768, 3072, 12, 64, 12), overrides)


def t5_large(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 large: 24+24 layers, 1024/4096, 16 heads of 64; 738M parameters."""
    return _t5(attention, max_length, _v1_0(1024, 4096, 16, 64, 24), overrides)


def t5_3b(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 3B: 24+24 layers, 1024/16384, 32 heads of 128; 2.85B parameters."""
    return _t5(attention, max_length, _v1_0(1024, 16_384, 32, 128, 24), overrides)


def t5_11b(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.0 11B: 24+24 layers, 1024/65536, 128 heads of 128; 11.3B parameters."""
    return _t5(attention, max_length, _v1_0(1024, 65_536, 128, 128, 24), overrides)


def t5_1_1_tiny(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 shapes at a size for laptops and tests: 2+2 layers, 128/352, 4 heads."""
    return _t5(attention, max_length, _v1_1(128, 352, 4, 32, 2), overrides)


def t5_1_1_small(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 small: 8+8 layers, 512/1024, 6 heads of 64; 77M parameters."""
    return _t5(attention, max_length, _v1_1(512, 1024, 6, 64, 8), overrides)


def t5_1_1_base(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 base: 12+12 layers, 768/2048, 12 heads of 64; 248M parameters."""
    return _t5(attention, max_length, _v1_1(768, 2048, 12, 64, 12), overrides)


def t5_1_1_large(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 large: 24+24 layers, 1024/2816, 16 heads of 64; 783M parameters."""
    return _t5(attention, max_length, _v1_1(1024, 2816, 16, 64, 24), overrides)


def t5_1_1_3b(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 3B (XL): 24+24 layers, 2048/5120, 32 heads of 64; 2.85B parameters."""
    return _t5(attention, max_length, _v1_1(2048, 5120, 32, 64, 24), overrides)


def t5_1_1_11b(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """T5 v1.1 11B (XXL): 24+24 layers, 4096/10240, 64 heads of 64; 11.1B parameters."""
    return _t5(attention, max_length, _v1_1(4096, 10_240, 64, 64, 24), overrides)


def paper_c4_base(attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides) -> EncoderDecoderConfig:
    """The paper's C4 set-up, T5 base with N = 512 (Synthesizer section 4.2; 223M to 292M parameters).

    The paper's counts come out with 8 heads of 128 in synthetic self-attention, T5's own 12 heads of 64 in
    cross-attention, and, for the Transformer's row, 12 heads of 64 throughout.
    """
    sizes = _v1_0(768, 3072, 8, 128, 12) | {"cross_heads": 12, "cross_head_dim": 64}
    if isinstance(synthesizer(attention, max_length), DotProduct):
        sizes |= {"heads": 12, "head_dim": 64}
    return _t5(attention, max_length, sizes, overrides)


def paper_mt_base(attention: str | Spec | Mixer = "V", max_length: int = 256, **overrides) -> EncoderDecoderConfig:
    """The paper's translation set-up: 6+6 layers, 512/2048, 8 heads of 64, N = 256 (Synthesizer section 4.1).

    The paper does not name its vocabulary; 45,056 rows, tied, give its counts (V and R 67M, R+V 73M). Positions are
    T5's relative bias here, where the paper's Tensor2Tensor models add sinusoids.
    """
    return _t5(attention, max_length, _v1_0(512, 2048, 8, 64, 6) | {"vocab_size": 45_056}, overrides)


def _one_stack(stack, features, mlp_features, heads, head_dim, layers):
    return {
        "features": features,
        "mlp_features": mlp_features,
        "heads": heads,
        "head_dim": head_dim,
        f"{stack}_layers": layers,
        "mlp_activation": "relu",
    }


def lm_tiny(attention: str | Spec | Mixer = "V", max_length: int = 256, **overrides) -> DecoderOnlyConfig:
    """A language model for laptops and tests: 2 layers, 128/512, 4 heads of 32, tied embedding."""
    sizes = _one_stack("decoder", 128, 512, 4, 32, 2) | {"tied_embedding": True}
    return _preset(DecoderOnlyConfig, attention, max_length, sizes, overrides)


def paper_lm1b_base(attention: str | Spec | Mixer = "V", max_length: int = 256, **overrides) -> DecoderOnlyConfig:
    """The paper's LM1B set-up: 6 layers, 512/2048, 8 heads of 64, N = 256 (Synthesizer section 4.1).

    Not from the paper: T5's vocabulary, tied, and T5's relative bias where Tensor2Tensor's models add sinusoids.
    """
    sizes = _one_stack("decoder", 512, 2048, 8, 64, 6) | {"tied_embedding": True}
    return _preset(DecoderOnlyConfig, attention, max_length, sizes, overrides)


def classifier_tiny(
    num_classes: int, attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides
) -> EncoderOnlyConfig:
    """A classifier for laptops and tests: 2 layers, 128/512, 4 heads of 32."""
    sizes = _one_stack("encoder", 128, 512, 4, 32, 2) | {"num_classes": num_classes}
    return _preset(EncoderOnlyConfig, attention, max_length, sizes, overrides)


def paper_classifier(
    num_classes: int, attention: str | Spec | Mixer = "V", max_length: int = 512, **overrides
) -> EncoderOnlyConfig:
    """For the paper's AG News and movie reviews: 4 layers, 256/1024, 4 heads of 64.

    The paper gives no sizes; these are of its authors' nearest published set-up, with k = 32: "FR[rank=32]". Reviews are
    longer than 512 tokens: cut them, or give a larger max_length.
    """
    sizes = _one_stack("encoder", 256, 1024, 4, 64, 4) | {"num_classes": num_classes}
    return _preset(EncoderOnlyConfig, attention, max_length, sizes, overrides)


# JSON.


def to_json(config: ModelConfig) -> str:
    """The configuration as JSON text: its kind and fields; specs as {"kind": class name, field: value, ...}."""
    fields = {field.name: _encode(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return json.dumps({"kind": type(config).__name__} | fields, indent=2) + "\n"


def config_from_json(text: str) -> ModelConfig:
    """The configuration that `to_json` wrote; without a kind, as in earlier files, an EncoderDecoderConfig.

    Raises ValueError where a field, or a kind of model or scores, is unknown.
    """
    fields = json.loads(text)
    kinds = {kind.__name__: kind for kind in KINDS}
    name = fields.pop("kind", EncoderDecoderConfig.__name__)
    if name not in kinds:
        raise ValueError(f"model configuration: unknown kind of model {name!r}; expected one of {', '.join(kinds)}")
    unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(kinds[name])})
    if unknown:
        raise ValueError(
            f"model configuration: unknown fields {', '.join(unknown)}; it was written by another version of "
            "synthesizer_jax"
        )
    return kinds[name](**{name: _decode(value) for name, value in fields.items()})


def _encode(value) -> Any:
    if isinstance(value, Spec | Mixer | Sparse):
        fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | fields
    return [_encode(part) for part in value] if isinstance(value, tuple) else value


def _decode(value) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    if not isinstance(value, dict):
        return value
    return _kind_of(value["kind"])(**{name: _decode(field) for name, field in value.items() if name != "kind"})


def _kind_of(name: str) -> type:
    """The class of scores or mixers of this name: ours, or one that a module of the user's has defined."""
    ours = getattr(scores, name, getattr(mixers, name, None))
    if isinstance(ours, type) and issubclass(ours, Spec | Mixer | Sparse):
        return ours
    found = [kind for kind in subclasses(Spec) + subclasses(Mixer) if kind.__name__ == name]
    if len(found) != 1:
        several = f"; there are several: {', '.join(kind.__module__ for kind in found)}" if found else ""
        raise ValueError(
            f"model configuration: unknown kind of scores {name!r}{several or '; import the module that defines it first; on the command line by a --gin_file with the line: import my_module'}"
        )
    return found[0]
