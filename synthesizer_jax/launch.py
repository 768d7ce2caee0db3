"""From gin files and flags to the arguments of a command. The only file that imports gin.

Files and flags are read here with gin's own parser, checked as a whole (configuration.py), and only then handed to gin,
which resolves them. Two rules go beyond gin's:

- `train.random_seed = %RANDOM_SEED` where nobody gives RANDOM_SEED leaves the parameter at its default; without a
  default the macro is missing. So a default stands once, in the code, and files compose in any order.
- `NAME = %gin.REQUIRED` asks for NAME even where there is a default; any other binding of NAME satisfies it.
"""

import dataclasses
import functools
import importlib
import importlib.resources
import inspect
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import gin
from etils import epath
from gin import config_parser

from synthesizer_jax import annotations, mixers, models, scores, sharding
from synthesizer_jax.configuration import Binding, Macro, Program, Reference, did_you_mean, near, parameters
from synthesizer_jax.scores.base import subclasses
from synthesizer_jax.training import optimizer


@dataclasses.dataclass(frozen=True)
class Command:
    """Where its function and its checks are; imported when the command runs, because seqio takes seconds."""

    function: tuple[str, str]  # module, name
    preflight: tuple[str, str] | None = None  # arguments -> lines for the user
    serves: str | None = None  # another command: what its gin files and flags say holds here, too, or is of no interest


COMMANDS = {
    "train": Command(("synthesizer_jax.training.loop", "train"), ("synthesizer_jax.preflight", "before_training")),
    "evaluate": Command(("synthesizer_jax.evaluation", "evaluate"), ("synthesizer_jax.preflight", "before_evaluation")),
    "infer": Command(("synthesizer_jax.evaluation", "infer"), ("synthesizer_jax.preflight", "before_inference")),
    "costs": Command(("synthesizer_jax.analysis.costs", "report")),
    "compile": Command(
        ("synthesizer_jax.analysis.compilation", "report"),
        ("synthesizer_jax.analysis.compilation", "preflight"),
        serves="train",
    ),
    "reproduce": Command(("synthesizer_jax.analysis.comparison", "compare")),
}

# The macros that the shipped files refer to: name -> (an example, what it is).
MACROS = {
    "MODEL_DIR": ('"runs/my_run"', "folder of the run: checkpoints, logs, results"),
    "MIXTURE_OR_TASK_NAME": ('"quickstart_span_corruption"', "a seqio task or mixture"),
    "MIXTURE_OR_TASK_MODULE": ('"my_tasks"', "the module that registers it, unless it is one of ours"),
    "VOCABULARY": (
        '"t5/sentencepiece.model"',
        "a copy of T5's SentencePiece model, for our tasks; also SYNTHESIZER_JAX_VOCAB",
    ),
    "TASK_FEATURE_LENGTHS": (
        '{"inputs": 512, "targets": 114}',
        "tokens of each feature; of a language model's targets, of a classifier's inputs alone",
    ),
    "TRAIN_STEPS": ("10000", "the step at which training ends"),
    "BATCH_SIZE": ("128", "sequences in a batch, over all devices"),
    "ATTENTION": (
        '"R+V"',
        "self-attention: V R fixedR FR D FD or a sum of them; or a class such as Linformer[rank=64]",
    ),
    "NUM_CLASSES": ("2", "classes of a classifier"),
    "MAX_LENGTH": ("512", "n, the longest sequence that R, FR, D and FD take"),
    "INITIAL_CHECKPOINT_PATH": ('"runs/pretrained"', "parameters to start from: a checkpoint or a MODEL_DIR"),
    "CHECKPOINT_PATH": ('"runs/my_run"', "a checkpoint, or a MODEL_DIR for its latest"),
    "OUTPUT_DIR": ('"runs/my_results"', "where results go, if not into the MODEL_DIR"),
    "INPUT_FILE": ('"inputs.txt"', "a text file with one input a line"),
    "NUM_EXAMPLES": ("100", "only the first examples of each task; by default all"),
    "SPLIT": ('"validation"', "a split of the task"),
    "TOPOLOGY": ('"v5e:4x4"', "a TPU slice to compile for, in chips, or cpu:8"),
    "DROPOUT_RATE": ("0.1", "0 <= rate < 1"),
    "LEARNING_RATE": ("0.001", "the rate, or the scale of a schedule"),
    "WARMUP_STEPS": ("10000", "steps of warm-up"),
    "LABEL_SMOOTHING": ("0.1", "0 <= amount < 1"),
    "Z_LOSS": ("0.0001", "weight of log(Z)^2 in the loss"),
    "RANDOM_SEED": ("0", "of parameters, data order and dropout"),
    "USE_CACHED_TASKS": ("True", "True: cached tasks only, False: never; by default where there is a cache"),
    "DATA_SHARDS": ("8", "streams that the data is read in, divided among the hosts; by default 1, read whole by each"),
    "PACK": ("False", "whether several examples share a row in training"),
    "CHECKPOINT_PERIOD": ("1000", "steps between checkpoints"),
    "KEEP": ("3", "how many checkpoints stay, the last ones; None: all"),
    "KEEP_PERIOD": ("10000", "checkpoints at multiples of so many steps stay besides, as long as it is given"),
    "EVAL_PERIOD": ("1000", "steps between evaluations of the loss in training"),
    "PROFILE_STEPS": ("(100, 105)", "steps, from the first to before the second, that are traced to MODEL_DIR/profile"),
    "DTYPE": ('"bfloat16"', "of activations; parameters are float32"),
    "PARAM_DTYPE": ('"bfloat16"', "of parameters; float32 by default"),
    "REMAT": ('"full"', "what the backward pass computes again: none, full, dots or attention"),
    "MESH_DATA": ("4", "devices that share a batch and hold all parameters; by default all that the others leave"),
    "MESH_FSDP": ("8", "devices that share a batch and the storage of parameters"),
    "MESH_MODEL": ("2", "devices that share heads, MLP and vocabulary"),
    "MICROBATCHES": ("4", "parts of a batch that are gone through one after the other, for less memory"),
    "LOSS_CHUNKS": ("8", "parts of the vocabulary that the loss is computed in, for less memory"),
}

_NOT_CONFIGURED = (scores.Dims, scores.Scores, mixers.Surroundings)  # what layers give and take, not what users choose

# All that attention can be made of: what the contents pages of scores and mixers list.
_SPECS = tuple(
    kind
    for kind in {**vars(scores), **vars(mixers)}.values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in _NOT_CONFIGURED
)
_PRESETS = (
    models.t5_tiny,
    models.t5_small,
    models.t5_base,
    models.t5_large,
    models.t5_3b,
    models.t5_11b,
    models.t5_1_1_tiny,
    models.t5_1_1_small,
    models.t5_1_1_base,
    models.t5_1_1_large,
    models.t5_1_1_3b,
    models.t5_1_1_11b,
    models.paper_c4_base,
    models.paper_mt_base,
    models.lm_tiny,
    models.paper_lm1b_base,
    models.classifier_tiny,
    models.paper_classifier,
)
_SETTINGS = (
    optimizer.Adafactor,
    optimizer.AdamW,
    optimizer.InverseSqrt,
    optimizer.Constant,
    sharding.MeshShape,
    sharding.Rules,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a command is to do."""

    command: str
    arguments: Mapping[str, Any]  # of the command's function
    task_modules: tuple[str, ...]  # to be imported before it
    vocabulary: str | None  # path of the SentencePiece model of our tasks
    config: str  # the operative configuration as gin text, which parses again

    def preflight(self) -> list[str]:
        """Checks the arguments, defaults included, without running anything; lines for the user."""
        where = COMMANDS[self.command].preflight
        if where is None:
            return []
        bound = inspect.signature(_function(self.command)).bind(**self.arguments)
        bound.apply_defaults()
        return _imported(where)(bound.arguments)

    def run(self) -> Any:
        """Calls the command's function; what trains writes the configuration to its model_dir."""
        function = _function(self.command)
        notes = {"notes": {"config.gin": self.config}} if self.command == "train" else {}
        return function(**self.arguments, **notes)


def make_plan(command: str, gin_files: Sequence[str], flags: Sequence[str], search_paths: Sequence[str] = ()) -> Plan:
    """The arguments of a command from gin files and flags ("NAME=VALUE").

    Raises one ValueError that lists every fault: missing and misspelt macros, unknown names, wrong types.
    """
    reader = _Reader(search_paths)
    for name in gin_files:
        reader.read_file(name)
    for flag in flags:
        reader.read_flag(flag)
    _register(command)
    _register_users_own()
    examples = {name: example for name, (example, _) in MACROS.items()}
    served, bindings = COMMANDS[command].serves, _for_command(command, reader.bindings)
    program = Program(command, bindings, _Registry(), set(COMMANDS) - {command}, examples, {served} - {None})
    if program.faults:
        raise ValueError(_as_text(program.faults))
    gin.clear_config()
    gin.parse_config(_gin_text(program, reader.imports))
    arguments = dict(gin.get_configurable(command)())
    _check_made(command, arguments)
    modules = arguments.pop("mixture_or_task_module", None) or ()
    modules = (modules,) if isinstance(modules, str) else tuple(modules)
    vocabulary = arguments.pop("vocabulary", None)
    return Plan(command, arguments, modules, vocabulary, gin.operative_config_str(max_line_length=120))


def _for_command(command: str, bindings: Sequence[Binding]) -> list[Binding]:
    """The bindings, those of a command that this one serves as its own where it has the same parameter."""
    served, own = COMMANDS[command].serves, inspect.signature(_function(command)).parameters
    return [
        dataclasses.replace(binding, selector=command)
        if served and binding.selector == served and binding.argument in own
        else binding
        for binding in bindings
    ]


def _check_made(command: str, arguments: Mapping[str, Any]) -> None:
    """Refuses what a configurable made where another class is wanted: `model` makes any kind of model."""
    for name, parameter in parameters(gin.get_configurable(command)).items():
        if name in arguments and not annotations.fits(arguments[name], parameter.annotation):
            wanted, made = annotations.spell(parameter.annotation), type(arguments[name]).__name__
            raise ValueError(f"{command}.{name}: expected {wanted}, got {made}")


def _function(command: str) -> Callable:
    return _imported(COMMANDS[command].function)


def _imported(where: tuple[str, str]) -> Callable:
    module, name = where
    return getattr(importlib.import_module(module), name)


def shipped_files() -> list[str]:
    """The gin files of the package, as they are named on the command line."""
    folder = _shipped_folder()
    found = [path for pattern in ("*/*.gin", "*/*/*.gin") for path in folder.glob(pattern)]
    return sorted(str(path.relative_to(folder)) for path in found)


def shipped_files_in_short() -> list[str]:
    """The same, those of a table of experiments on one line: experiments/c4/{D,R,V}.gin."""
    tables: dict[str, list[str]] = {}
    for name in shipped_files():
        folder, _, file = name.rpartition("/")
        tables.setdefault(folder if folder.count("/") else name, []).append(file.removesuffix(".gin"))
    return [name if name.endswith(".gin") else f"{name}/{{{','.join(rows)}}}.gin" for name, rows in tables.items()]


def _shipped_folder() -> epath.Path:
    return epath.Path(str(importlib.resources.files("synthesizer_jax.gin_configs").joinpath("__init__.py"))).parent


def _gin_text(program: Program, imports: Iterable[str]) -> str:
    bindings = [f"{b.key} = {b.value!r}" for key, b in program.bound.items() if not program.open(key)]
    return "\n".join([*dict.fromkeys(imports), *bindings, ""])


def _as_text(faults: Sequence[str]) -> str:
    lines = [line for fault in faults for line in fault.splitlines()]
    return lines[0] if len(lines) == 1 else "\n  ".join(["the configuration has faults:", *lines])


# Reading files and flags


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


class _Reader:
    """Reads files and flags in order; keeps their bindings and imports."""

    def __init__(self, search_paths: Sequence[str]):
        for path in search_paths:
            if not epath.Path(path).is_dir():
                raise ValueError(f"--gin_search_paths: no such directory: {path}")
        self.own_folders = [epath.Path("."), *map(epath.Path, search_paths)]
        self.bindings: list[Binding] = []
        self.imports: list[str] = []

    def read_file(self, name: str, given_by: str | None = None, including: tuple[str, ...] = ()):
        given_by = given_by or name
        path = self._find(name, including)
        if str(path) in including:
            raise ValueError(f"gin file {name} includes itself, by way of {' and '.join(including)}")
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"gin file {name}: expected text in UTF-8: {error}") from error
        for statement in _statements(text, name):
            place = f"{name}, line {statement.location.line_num}"
            match statement:
                case config_parser.BindingStatement():
                    self.bindings.append(Binding(*statement[:4], place, given_by))
                case config_parser.IncludeStatement():
                    self.read_file(statement.filename, given_by, (*including, str(path)))
                case config_parser.ImportStatement():
                    self._import(statement, place)

    def read_flag(self, text: str):
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise ValueError(f"--gin.{name}: expected --gin.NAME=VALUE, got --gin.{text}")
        try:
            (statement,) = config_parser.ConfigParser(f"{name} = {value}\n", _Delegate())
        except (SyntaxError, ValueError, tokenize.TokenError) as error:
            hint = _quoting(value, MACROS.get(name), spell=lambda text: f"--gin.{name}='{text}'")
            raise ValueError(f"--gin.{name}: {value} is not a gin value; {hint}") from error
        self.bindings.append(Binding(*statement[:4], f"--gin.{name}", f"--gin.{name}"))

    def _find(self, name: str, including: tuple[str, ...]) -> epath.Path:
        beside = [epath.Path(including[-1]).parent] if including else []
        for path in (folder / name for folder in [*beside, *self.own_folders, _shipped_folder()]):
            if path.exists() and not path.is_dir():
                return path
        known = shipped_files()
        hint = did_you_mean(name, known)
        if not hint:
            short = {file.rpartition("/")[2]: file for file in known}
            hint = f"; did you mean {' or '.join(short[n] for n in near(name, short))}?" if near(name, short) else ""
        included = f", included by {including[-1]}" if including else ""
        raise ValueError(
            f"no gin file {name!r}{included}; looked in {', '.join(map(str, self.own_folders))} and among "
            f"the shipped files{hint or ': ' + ', '.join(shipped_files_in_short())}"
        )

    def _import(self, statement: config_parser.ImportStatement, place: str):
        if statement.module.startswith("__gin__"):
            raise ValueError(
                f"{place}: {statement.format()!r}: dynamic registration is not used here; configurables go "
                "by their plain names, such as train.batch_size; remove this line"
            )
        try:
            importlib.import_module(statement.module)
        except ModuleNotFoundError as error:
            if error.name != statement.module and not statement.module.startswith(f"{error.name}."):
                raise
            raise ValueError(
                f"{place}: {statement.format()!r}: there is no module {error.name!r}; is its folder on PYTHONPATH?"
            ) from error
        self.imports.append(statement.format())


def _statements(text: str, name: str) -> Iterator:
    """The statements of a gin file. gin reports a syntax error with its place as the second argument."""
    try:
        yield from config_parser.ConfigParser(text, _Delegate())
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        place = error.args[1] if len(error.args) > 1 and isinstance(error.args[1], tuple) else (None, None)
        number = place[0] if isinstance(error, tokenize.TokenError) else place[1]
        lines = text.splitlines()
        source = lines[number - 1].strip() if number and number <= len(lines) else ""
        key, _, value = (piece.strip() for piece in source.partition("="))
        hint = _quoting(value, MACROS.get(key), spell=lambda text: f"{key} = {text}")
        raise ValueError(f"{name}, line {number}: cannot read {source!r}; {hint}") from error


def _quoting(value: str, macro: tuple[str, str] | None, spell: Callable[[str], str]) -> str:
    """How to write a value that gin cannot read: most often a string whose quotes the shell has eaten."""
    if value[:1] in tuple("{[("):
        example = macro[0] if macro else '{"inputs": 512}'
        return f"strings need quotes and brackets must close, as in {spell(example)}"
    bare = value.strip("\"'")
    return f"a string is written in quotes: {spell(chr(34) + bare + chr(34))}"


# What can be configured


class _Registry:
    """gin's registry as Program wants it."""

    def find(self, selector: str) -> Callable | None:
        try:
            return gin.get_configurable(selector)
        except (ValueError, KeyError):
            return None

    def names(self) -> Iterable[str]:
        return [f.__name__ for f in (model, mixers.synthesizer, *_SPECS, *_PRESETS, *_SETTINGS)] + list(COMMANDS)


_AS_PRESET = object()  # the default of a field that the preset decides


AnyConfig = models.EncoderDecoderConfig | models.DecoderOnlyConfig | models.EncoderOnlyConfig


def model(preset: Callable[..., AnyConfig], **fields: Any) -> AnyConfig:
    """A preset with some fields replaced; `attention` and `max_length` as the preset takes them."""
    return preset(**fields)


def _model_signature() -> inspect.Signature:
    """Of `model`: the fields of all kinds of model by name, so that a misspelt field or a wrong type is found before
    anything runs. A field of another kind than the preset's is refused by the preset."""
    fields = {"attention": str | scores.Spec | mixers.Mixer, "max_length": int}
    for kind in (models.EncoderDecoderConfig, models.DecoderOnlyConfig, models.EncoderOnlyConfig):
        hints = get_type_hints(kind)
        fields |= {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    preset = inspect.Parameter("preset", keyword, annotation=Callable[..., AnyConfig])
    return inspect.Signature(
        [
            preset,
            *(inspect.Parameter(name, keyword, default=_AS_PRESET, annotation=kind) for name, kind in fields.items()),
        ],
        return_annotation=AnyConfig,
    )


model.__signature__ = _model_signature()


@functools.cache
def _register(command: str) -> None:
    """Makes a command's function known to gin as a function that returns its arguments; it is called later."""

    def arguments(**given):
        return given

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(_function(command), eval_str=True)
    module = inspect.Parameter("mixture_or_task_module", keyword, default=None, annotation=str | Sequence[str] | None)
    vocabulary = inspect.Parameter("vocabulary", keyword, default=None, annotation=str | None)
    every = {**signature.parameters, module.name: module, vocabulary.name: vocabulary}  # used before it is called
    arguments.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in every.values()])
    gin.external_configurable(arguments, name=command, module="synthesizer_jax")


def _register_users_own() -> None:
    """Makes scores and mixers that imported modules define known to gin, unless they have done it themselves."""
    for kind in subclasses(scores.Spec) + subclasses(mixers.Mixer):
        if dataclasses.is_dataclass(kind) and _Registry().find(kind.__name__) is None:
            gin.external_configurable(kind, module=kind.__module__)


for _configurable in (model, mixers.synthesizer, *_SPECS, *_PRESETS, *_SETTINGS):
    gin.external_configurable(_configurable, module="synthesizer_jax")
