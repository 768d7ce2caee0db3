"""The command line: python -m synthesizer_jax {train,evaluate,infer,costs,reproduce} --gin_file=... --gin.NAME=VALUE"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow only reads data here and need not look for a GPU


import jax
from etils import epath

try:
    from synthesizer_jax import launch
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

Strings are quoted twice, because the shell takes one pair of quotes: --gin.ATTENTION='"R+V"'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. A fault of the user's is one message, a fault of ours a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args([a for a in argv if not a.startswith("--gin.")])
    bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
    try:
        _run(arguments, [*arguments.gin_bindings, *bindings])
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        if not _raised_here(error):
            raise
        print("error: " + str(error).partition("\n  In call to configurable")[0], file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace, bindings: Sequence[str]) -> None:
    search_paths = _split(arguments.gin_search_paths)
    plan = launch.make_plan(arguments.command, arguments.gin_file, bindings, search_paths)
    _point_to_data(arguments.tfds_data_dir, _split(arguments.seqio_additional_cache_dirs))
    if plan.vocabulary is not None:
        os.environ["SYNTHESIZER_JAX_VOCAB"] = plan.vocabulary
    for module in plan.task_modules:
        _import_tasks(module)
    facts = plan.preflight()
    if arguments.dry_run:
        print("\n".join([plan.config, *facts, "nothing was run (--dry_run)"]))
        return
    if plan.command == "train" and jax.process_index() == 0:
        folder = epath.Path(plan.arguments["model_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.gin").write_text(plan.config)
    _report(plan.command, plan.run())


def _report(command: str, result: Any) -> None:
    if command == "evaluate":
        for task, metrics in result.items():
            for name, value in metrics.items():
                print(f"{task}  {name}  {value:.6g}" if isinstance(value, float) else f"{task}  {name}  {value}")
    elif command == "infer":
        print("\n".join(f"wrote {path}" for path in result))
    elif command == "costs":
        print(result.as_markdown())


def _parser() -> argparse.ArgumentParser:
    macros = "\n".join(f"  {name:24} {meaning}; e.g. {example}" for name, (example, meaning) in launch.MACROS.items())
    parser = argparse.ArgumentParser(
        prog="python -m synthesizer_jax",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train, evaluate and use Synthesizer T5 models, configured by gin files.",
        epilog=f"{EXAMPLES}\nmacros of the shipped gin files:\n{macros}\n\nshipped gin files:\n  "
        + "\n  ".join(launch.shipped_files()),
    )
    add = parser.add_argument
    add("command", choices=launch.COMMANDS)
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
    add("--tfds_data_dir", metavar="DIR", help="where TensorFlow Datasets keeps its data")
    add("--seqio_additional_cache_dirs", default="", metavar="DIR,DIR", help="where cached tasks are looked for")
    add("--dry_run", action="store_true", help="check everything, print the resolved configuration, run nothing")
    return parser


def _split(paths: str) -> list[str]:
    return [path for path in paths.split(",") if path]


def _point_to_data(tfds_data_dir: str | None, cache_dirs: Sequence[str]) -> None:
    for flag, folder in [("tfds_data_dir", tfds_data_dir), *(("seqio_additional_cache_dirs", d) for d in cache_dirs)]:
        if folder and "://" not in folder and not os.path.isdir(folder):
            raise ValueError(f"--{flag}: no such directory: {folder}")
    if tfds_data_dir or cache_dirs:
        import seqio

        if tfds_data_dir:
            seqio.set_tfds_data_dir_override(tfds_data_dir)
        seqio.add_global_cache_dirs(list(cache_dirs))


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
    sys.exit(main())
