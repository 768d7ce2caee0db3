"""A tiny R+V model trained and evaluated on each of the real tasks, through the command line: docs/real_tasks.md.

    python benchmarks/real_tasks.py --tfds_data_dir=DIR --data_dir=DIR --vocabulary=FILE > docs/real_tasks.md

Shows that everything works together, on samples of the data as well as on all of it; not how good anything is. It takes
about half an hour on 2 cores. --work_dir keeps the runs and goes on with those that are there; --only=NAME,... some of them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import seqio

from synthesizer_jax import catalogue, data, launch

DIALOGUES = 800  # of PersonaChat's validation file, where there is no training file; the others stay for validation


@dataclasses.dataclass(frozen=True)
class Run:
    """One row: a table of experiments/ in small, and where it departs from that."""

    name: str
    table: str
    split: str = "validation"  # that is evaluated
    task: str | None = None  # None: the table's own
    start: str | None = None  # the run whose parameters it begins with
    flags: tuple[str, ...] = ()
    cut: bool = False  # whether the task joins its rows and cuts them into pieces of the length


FINETUNING = {"table": "en_mix", "start": "c4"}
RUNS = (
    Run("c4", "c4", cut=True),
    Run("rte", task="glue_rte", **FINETUNING),
    Run("sst2", task="glue_sst2", **FINETUNING),
    Run("cb", task="super_glue_cb", **FINETUNING),
    Run("multi30k", "multi30k"),
    Run("lm1b", "lm1b", "test"),
    Run("cnn_dailymail", "cnn_dailymail"),
    Run("personachat", "personachat"),
    Run("ag_news", "ag_news", "test"),
    Run("movie_reviews", "movie_reviews"),
)
WHAT = {"loss": 3, "perplexity": 1}  # digits of what is no percentage


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tfds_data_dir", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--vocabulary", required=True)
    parser.add_argument("--work_dir", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(run.name for run in RUNS))
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    with contextlib.ExitStack() as stack:
        work = arguments.work_dir or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        os.environ["SYNTHESIZER_JAX_VOCAB"] = os.path.abspath(arguments.vocabulary)
        os.environ["SYNTHESIZER_JAX_DATA"] = str(corpora(pathlib.Path(arguments.data_dir), work / "data"))
        seqio.set_tfds_data_dir_override(arguments.tfds_data_dir)
        rows = [row(run, work, arguments.tfds_data_dir) for run in RUNS if run.name in wanted]
    print(PAGE.format(rows="\n".join(rows)))


def corpora(given: pathlib.Path, made: pathlib.Path) -> pathlib.Path:
    """The folder of corpora; where PersonaChat has no training file, one with its validation file divided in two."""
    chat = given / "personachat"
    train, valid = (f"{split}_self_original_no_cands.txt" for split in ("train", "valid"))
    if (chat / train).exists() or not (chat / valid).exists():
        return given.absolute()
    (made / "personachat").mkdir(parents=True, exist_ok=True)
    for folder in given.iterdir():
        if folder.name != "personachat" and not (made / folder.name).exists():
            (made / folder.name).symlink_to(folder.absolute())
    lines = (chat / valid).read_text().splitlines(keepends=True)
    number = list(itertools.accumulate(line.startswith("1 ") for line in lines))
    for name, inside in ((train, lambda n: n <= DIALOGUES), (valid, lambda n: n > DIALOGUES)):
        text = "".join(line for line, n in zip(lines, number, strict=True) if inside(n))
        (made / "personachat" / name).write_text(text)
    return made.absolute()


def row(run: Run, work: pathlib.Path, tfds_data_dir: str) -> str:
    """Trains, evaluates, and gives a line of the table."""
    folder = work / run.name
    files = [f"--gin_file=experiments/{run.table}/{name}.gin" for name in ("R+V", "mini")]
    flags = [*run.flags, *([f'--gin.MIXTURE_OR_TASK_NAME="{run.task}"'] if run.task else [])]
    start = [f'--gin.INITIAL_CHECKPOINT_PATH="{work / run.start}"'] if run.start else []
    places = [f"--tfds_data_dir={tfds_data_dir}"]
    command("train", *files, f'--gin.MODEL_DIR="{folder}"', *flags, *start, *places)
    use = [f'--gin.CHECKPOINT_PATH="{folder}"', f'--gin.SPLIT="{run.split}"']
    command("evaluate", *files, "--gin_file=runs/evaluate.gin", *use, *flags, *places)
    train = lines(folder / "train" / "metrics.jsonl")
    (results,) = (folder / "inference_eval").glob("*-metrics.jsonl")
    metrics, name = lines(results)[-1], results.name.removesuffix("-metrics.jsonl")
    step, task = metrics.pop("step"), data.get_mixture_or_task(name.removesuffix(f"-{run.split}"))
    examples = len(lines(folder / "inference_eval" / f"{name}-{step}.jsonl"))
    if (metrics.pop("split"), metrics.pop("examples")) != (run.split, examples):
        raise AssertionError(f"{results}: its last line is not of {examples} examples of {run.split}")
    found = next(catalogue.entries(pattern=task.name)).examples
    expected = pieces(run, files, task) if run.cut else found[run.split]
    if examples != expected:
        raise AssertionError(f"{task.name}: {examples} examples evaluated, {expected} in {run.split}")
    if not train[-1]["loss"] < train[0]["loss"]:
        raise AssertionError(f"{task.name}: the loss did not fall: {train[0]['loss']} to {train[-1]['loss']}")
    losses = f"{train[0]['loss']:.3f} | {train[-1]['loss']:.3f}"
    rows = f"{examples:,} pieces of {found[run.split]:,}" if run.cut else f"{examples:,} of {found[run.split]:,}"
    shown = ", ".join(f"{name} {value(name, v)}" for name, v in metrics.items() if not isinstance(v, str))
    return f"| {task.name} | {found['train']:,} | {step} | {losses} | {run.split}: {rows} | {shown} |"


def pieces(run: Run, files: list[str], task: seqio.Task) -> int:
    """How many examples the split has, counted outside of evaluation."""
    plan = launch.make_plan("train", [file.partition("=")[2] for file in files], ['MODEL_DIR="unused"'])
    options = {"split": run.split, "shuffle": False, "seed": 0, "num_epochs": 1}
    return sum(1 for _ in data.task_dataset(task, plan.arguments["task_feature_lengths"], **options))


def value(name: str, number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    return f"{number:,.{WHAT.get(name, 2)}f}" if isinstance(number, float) else f"{number:,}"


def command(*words: str) -> None:
    """Runs the command line; what it says goes to our error output, as the table alone goes to the other."""
    subprocess.run([sys.executable, "-m", "synthesizer_jax", *words], check=True, stdout=sys.stderr)


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PAGE = """# The real tasks, in small

Made by `python benchmarks/real_tasks.py`: a tiny model with R+V attention (experiments/<table>/R+V.gin with mini.gin) trained
for a few hundred steps on a sample of each data set and evaluated over a whole split, by the same commands that run the full
experiments. RTE, SST-2 and CB start from the C4 run. Nothing here can be compared with a published number: models, steps,
training data and some of the splits are cut down or stand-ins.

| task | training rows | steps | loss, first 100 steps | last 100 steps | evaluated | metrics |
| --- | ---: | ---: | ---: | ---: | --- | --- |
{rows}
"""

if __name__ == "__main__":
    main()
