"""The command line: python -m synthesizer_jax COMMAND, of which {train,evaluate,infer,costs,compile,reproduce} are configured by
--gin_file=... --gin.NAME=VALUE, and {tasks,cache} are about data and have flags of their own."""

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow only reads data here and need not look for a GPU


import absl.logging
import jax
from etils import epath

try:
    from synthesizer_jax import launch
    from synthesizer_jax.training import distributed
except ModuleNotFoundError as missing:
    if missing.name and missing.name.startswith("synthesizer_jax"):
        raise
    sys.exit(f"error: the command line needs the module {missing.name!r}: pip install 'synthesizer_jax[train]'")

EXAMPLES = """
examples:
  pretrain a tiny model on the built-in text; fine-tune and evaluate as the head comments of runs/*.gin show:
    python -m synthesizer_jax train --gin_file=runs/quickstart.gin --gin.MODEL_DIR='"runs/my_run"'
  a model x an attention x a run, composed:
    python -m synthesizer_jax train --gin_file=models/t5_small.gin --gin_file=attention/R+V.gin \\
        --gin_file=runs/pretrain.gin --gin.MODEL_DIR='"runs/my_run"' --gin.MIXTURE_OR_TASK_NAME='"my_task"' \\
        --gin.MIXTURE_OR_TASK_MODULE='"my_tasks"' --gin.TASK_FEATURE_LENGTHS='{"inputs": 512, "targets": 114}' \\
        --gin.BATCH_SIZE=128 --gin.TRAIN_STEPS=10000
  see what would run, and what is missing:
    python -m synthesizer_jax train --gin_file=models/t5_base.gin --gin_file=runs/pretrain.gin --dry_run

  what tasks there are, what their examples look like, and tokenising one once and for all:
    python -m synthesizer_jax tasks
    python -m synthesizer_jax tasks show quickstart_number --split=validation -n 3
    python -m synthesizer_jax cache quickstart_number --output_cache_dir=cache

  whether it fits a TPU slice, and what it moves there, without a TPU: any training run's files and flags
    python -m synthesizer_jax compile --topology=v5e:4x4 --gin_file=experiments/c4/R+V.gin

  one of several processes, where neither a TPU pod nor srun, mpirun or GKE says which it is:
    python -m synthesizer_jax train ... --coordinator_address=node001:8476 --process_count=4 --process_index=2

Strings are quoted twice, because the shell takes one pair of quotes: --gin.ATTENTION='"R+V"'
"""

TRAINING = ("train", "reproduce")  # for which SIGTERM is a notice
ON_HOSTS = (*TRAINING, "evaluate", "infer")  # what several processes can do together


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. A fault of the user's is one message, a fault of ours a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["tasks"]:
            _tasks(_tasks_parser().parse_args(argv[1:]))
        elif argv[:1] == ["cache"]:
            _cache(_cache_parser().parse_args(argv[1:]))
        else:
            arguments = _parser().parse_args([a for a in argv if not a.startswith("--gin.")])
            bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
            _run(arguments, [*arguments.gin_bindings, *bindings])
    except BrokenPipeError:  # `tasks | head`
        sys.stdout = None
        return 0
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        if not _raised_here(error):
            raise
        print(distributed.named("error: " + str(error).partition("\n  In call to configurable")[0]), file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Without what libraries in C++ write past Python, and past their own settings, while they start."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _start_tensorflow() -> None:
    """TensorFlow only reads data here, but tells half a screen about processors and accelerators as it starts; seqio and
    TFDS warn of what is no fault, or is said by us."""
    with _silent_stderr():
        importlib.import_module("synthesizer_jax.data")
    absl.logging.get_absl_logger().addFilter(_not_theirs)


def _not_theirs(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not {"seqio", "tensorflow_datasets"} & set(record.pathname.split(os.sep))


def _start_processes(arguments: argparse.Namespace) -> None:
    names = ("coordinator_address", "process_count", "process_index")
    given = {name: getattr(arguments, name) for name in names}
    if arguments.command in ON_HOSTS:
        timeout, preemption = arguments.initialization_timeout, arguments.command in TRAINING
        distributed.start(**given, timeout=timeout, preemption=preemption)
    elif any(value is not None for value in given.values()):
        flags = ", ".join(f"--{name}" for name, value in given.items() if value is not None)
        raise ValueError(f"{flags}: `{arguments.command}` is done by one process; for {', '.join(ON_HOSTS)} only")


def _run(arguments: argparse.Namespace, bindings: Sequence[str]) -> None:
    _start_processes(arguments)
    if arguments.command == "compile":
        jax.config.update("jax_platforms", "cpu")  # a TPU that is here stays free
    elif arguments.command != "costs":
        _start_tensorflow()
        importlib.import_module("synthesizer_jax.training.logging").say_what_is_logged()
    search_paths = _split(arguments.gin_search_paths)
    bindings = [*bindings, *_compile_bindings(arguments)]
    plan = launch.make_plan(arguments.command, arguments.gin_file, bindings, search_paths)
    _point_to_data(arguments, plan.vocabulary)
    for module in plan.task_modules:
        _import_tasks(module)
    facts = plan.preflight()
    first = distributed.is_first()
    if arguments.dry_run:
        if first:
            print("\n".join([plan.config, *facts, "nothing was run (--dry_run)"]))
        return
    result = plan.run()
    if first:
        _report(plan.command, result)
        if arguments.json:
            epath.Path(arguments.json).write_text(result.as_json())


def _report(command: str, result: Any) -> None:
    if command == "evaluate":
        for task, metrics in result.items():
            for name, value in metrics.items():
                print(f"{task}  {name}  {value:.6g}" if isinstance(value, float) else f"{task}  {name}  {value}")
    elif command == "infer":
        print("\n".join(f"wrote {path}" for path in result))
    elif command in ("costs", "compile"):
        print(result.as_markdown())


def _compile_bindings(arguments: argparse.Namespace) -> list[str]:
    """Of the flags that `compile` alone has."""
    flags = {"topology": arguments.topology, "slices": arguments.slices, "steps": arguments.steps}
    given = {name: value for name, value in flags.items() if value is not None}
    if (given or arguments.json) and arguments.command != "compile":
        names = ", ".join(f"--{name}" for name in [*given, *["json"] * bool(arguments.json)])
        raise ValueError(f"{names}: of `compile` only, not of `{arguments.command}`")
    if arguments.json and not epath.Path(arguments.json).parent.is_dir():
        raise ValueError(f"--json: no such directory: {epath.Path(arguments.json).parent}")
    if arguments.json and epath.Path(arguments.json).is_dir():
        raise ValueError(f"--json: expected a file, got the directory {arguments.json}")
    return [f"compile.{name} = {value!r}" for name, value in given.items()]


def _parser() -> argparse.ArgumentParser:
    macros = "\n".join(f"  {name:24} {meaning}; e.g. {example}" for name, (example, meaning) in launch.MACROS.items())
    parser = argparse.ArgumentParser(
        prog="python -m synthesizer_jax",
        usage="%(prog)s COMMAND --gin_file=FILE ... --gin.NAME=VALUE ... [--dry_run]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train, evaluate and use Synthesizer T5 models, configured by gin files. About data, each with --help of "
        "its own: `tasks` lists tasks and shows their examples, `cache` tokenises them once and for all.",
        epilog=f"{EXAMPLES}\nmacros of the shipped gin files:\n{macros}\n\nshipped gin files:\n  "
        + "\n  ".join(launch.shipped_files_in_short()),
    )
    add = parser.add_argument
    add("command", choices=launch.COMMANDS, metavar="COMMAND", help=", ".join([*launch.COMMANDS, "tasks", "cache"]))
    add(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file, yours or a shipped one; may be repeated, later ones win",
    )
    add("--gin.NAME", action="store_true", dest="unused", help="=VALUE: a macro or a parameter; wins over the files")
    add("--gin_bindings", action="append", default=[], metavar="NAME=VALUE", help="the same in T5X's other spelling")
    add(
        "--gin_search_paths",
        default="",
        metavar="DIR,DIR",
        help="where gin files are looked for before the shipped ones",
    )
    _add_data_flags(add)
    add("--coordinator_address", metavar="HOST:PORT", help="where process 0 listens, of several; see the examples")
    add(
        "--process_count",
        type=int,
        metavar="N",
        help="how many processes run this command; 1: no other, whatever is found",
    )
    add("--process_index", type=int, metavar="I", help="which one this is, from 0 to N - 1")
    add(
        "--initialization_timeout",
        type=int,
        default=distributed.TIMEOUT,
        metavar="SECONDS",
        help=f"how long the processes wait for one another; by default {distributed.TIMEOUT}",
    )
    add("--topology", metavar="NAME:SIZES", help="of compile: a TPU slice such as v5e:4x4, or cpu:8; also TOPOLOGY")
    add("--slices", type=int, metavar="N", help="of compile: how many such slices; by default 1")
    add("--steps", type=_steps, metavar="STEP,...", help="of compile: some of train,eval,decode; by default all")
    add("--json", metavar="FILE", help="of compile: where all that it found goes, too")
    add("--dry_run", action="store_true", help="check everything, print the resolved configuration, run nothing")
    return parser


def _steps(names: str) -> tuple[str, ...]:
    return tuple(_split(names))


def _split(paths: str) -> list[str]:
    return [path for path in paths.split(",") if path]


def _add_data_flags(add) -> None:
    add("--tfds_data_dir", metavar="DIR", help="where TensorFlow Datasets keeps its data")
    add("--data_dir", metavar="DIR", help="the corpora that TFDS does not have; also SYNTHESIZER_JAX_DATA")
    add("--seqio_additional_cache_dirs", default="", metavar="DIR,DIR", help="where cached tasks are looked for")


def _point_to_data(arguments: argparse.Namespace, vocabulary: str | None) -> None:
    """Tells seqio, and tasks by the environment, where things are."""
    cache_dirs = _split(arguments.seqio_additional_cache_dirs)
    named = {"tfds_data_dir": [arguments.tfds_data_dir], "data_dir": [arguments.data_dir]}
    named["seqio_additional_cache_dirs"] = cache_dirs
    for flag, folders in named.items():
        for folder in folders:
            if folder and "://" not in folder and not os.path.isdir(folder):
                raise ValueError(f"--{flag}: no such directory: {folder}")
    if vocabulary is not None:
        os.environ["SYNTHESIZER_JAX_VOCAB"] = vocabulary
    if arguments.data_dir:
        os.environ["SYNTHESIZER_JAX_DATA"] = arguments.data_dir
    if arguments.tfds_data_dir or cache_dirs:
        import seqio

        if arguments.tfds_data_dir:
            seqio.set_tfds_data_dir_override(arguments.tfds_data_dir)
        seqio.add_global_cache_dirs(list(cache_dirs))


# Commands about data


def _data_parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    program = f"python -m synthesizer_jax {command}"
    parser = argparse.ArgumentParser(program, usage, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--module", action="append", default=[], help="a module that registers tasks of your own; may be repeated")
    add("--vocabulary", metavar="FILE", help="a copy of T5's SentencePiece model; also SYNTHESIZER_JAX_VOCAB")
    _add_data_flags(add)
    return parser


def _tasks_parser() -> argparse.ArgumentParser:
    parser = _data_parser(
        "tasks",
        "%(prog)s [PATTERN] ...  or  %(prog)s show NAME [--split=SPLIT] [-n N] ...",
        "`tasks` lists all tasks: splits with their examples before preprocessing, where they come from, and how to get what "
        'is missing. `tasks "glue_*"` lists some. `tasks show NAME` shows the first examples of a task or mixture.',
    )
    add = parser.add_argument
    add("what", nargs="*", metavar="PATTERN | show NAME")
    add("--split", help='of show; by default "validation"')
    add("-n", type=int, default=3, help="how many examples to show")
    add("--seed", type=int, default=0, help="of preprocessors that draw at random, and of mixing")
    add("--full", action="store_true", help="texts and ids in whole")
    add(
        "--task_feature_lengths",
        type=_lengths,
        metavar='{"inputs": N, "targets": N}',
        help="for tasks that make examples of a given length, such as span corruption; default 512 and 114",
    )
    return parser


def _lengths(text: str) -> dict[str, int]:
    lengths = json.loads(text)
    if not isinstance(lengths, dict) or not all(isinstance(n, int) and n > 0 for n in lengths.values()):
        raise ValueError(text)
    return lengths


def _tasks(arguments: argparse.Namespace) -> None:
    what = arguments.what
    if len(what) != 2 if what[:1] == ["show"] else len(what) > 1:
        raise ValueError(f"tasks: expected nothing, a pattern such as 'glue_*', or show NAME, got {' '.join(what)}")
    _start_tensorflow()
    _point_to_data(arguments, arguments.vocabulary)
    catalogue = importlib.import_module("synthesizer_jax.catalogue")
    known = catalogue.registered()
    for module in arguments.module:
        _import_tasks(module)
    if what[:1] != ["show"]:
        own = [name for name in catalogue.registered() if name not in known]
        found = list(catalogue.entries(own, *what))
        if not found:
            raise ValueError(f"tasks: no task's name matches {what[0]!r}; `tasks` lists all")
        return print(catalogue.table(found))
    options = {"seed": arguments.seed, "full": arguments.full}
    for line in catalogue.show(what[1], arguments.split, arguments.n, arguments.task_feature_lengths, **options):
        print(line)


def _cache_parser() -> argparse.ArgumentParser:
    parser = _data_parser(
        "cache",
        "%(prog)s NAME ... --output_cache_dir=DIR ...",
        "Tokenises tasks once and for all, with Apache Beam; training then reads the cache.",
    )
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="tasks, and mixtures, all of whose tasks are cached")
    add("--output_cache_dir", required=True, metavar="DIR")
    add("--split", action="append", help="only this one; may be repeated; by default all whose data is there")
    add("--num_shards", type=int, help="files of a split; by default up to 64, fewer of small splits")
    add("--seed", type=int, default=0, help="of preprocessors that draw at random")
    add("--overwrite", action="store_true", help="make what is there again")
    add(
        "--pipeline_options",
        default="--runner=DirectRunner",
        metavar="--OPTION=VALUE,...",
        help="of Beam, such as --pipeline_options=--runner=DataflowRunner,--project=...",
    )
    return parser


def _cache(arguments: argparse.Namespace) -> None:
    _start_tensorflow()
    _point_to_data(arguments, arguments.vocabulary)
    for module in arguments.module:
        _import_tasks(module)
    caching = importlib.import_module("synthesizer_jax.caching")
    results = caching.cache(
        arguments.names,
        arguments.output_cache_dir,
        splits=arguments.split,
        num_shards=arguments.num_shards,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
        pipeline_options=_split(arguments.pipeline_options),
        modules=arguments.module,
        tfds_data_dir=arguments.tfds_data_dir,
    )
    for cached in results:
        counts = "  ".join(f"{split} {count:,}" for split, count in cached.examples.items())
        print(
            f"{cached.name}  {counts}  {cached.folder}{'' if cached.made else '  (was there; --overwrite makes it again)'}"
        )
        for split, how in cached.left_out.items():
            print(f"  {split} left out: {how}")
    print(f"to read them, give the other commands --seqio_additional_cache_dirs={arguments.output_cache_dir}")


def _import_tasks(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"MIXTURE_OR_TASK_MODULE: there is no module {module!r}; is its folder on PYTHONPATH?"
        ) from error


def _raised_here(error: BaseException) -> bool:
    """True when the code that raised is this package's own: a check that failed, not a bug below it."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("synthesizer_jax", "__main__")


if __name__ == "__main__":
    distributed.end(main)
