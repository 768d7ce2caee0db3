"""Every shipped gin file is read, resolved and built; the large models by their shapes only."""

import re
import shlex

import jax
import pytest

import synthesizer_jax as sj
from synthesizer_jax import launch
from synthesizer_jax.models import parameters

MODELS, ATTENTIONS, RUNS, EXPERIMENTS = (
    [name for name in launch.shipped_files() if name.startswith(f"{folder}/")]
    for folder in ("models", "attention", "runs", "experiments")
)
TABLES = sorted({name.rpartition("/")[0] for name in EXPERIMENTS if name.count("/") == 2})
INCLUDED = ("models/options.gin", "runs/options.gin", "runs/mini.gin", *(f"{table}/table.gin" for table in TABLES))
MINI = [f"{table}/mini.gin" for table in TABLES]  # given after another file
GIVEN = ('MODEL_DIR="runs/run"', 'MIXTURE_OR_TASK_NAME="a_task"', 'TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 16}',
         "BATCH_SIZE=8", "TRAIN_STEPS=10")  # fmt: skip
MILLION = {"M": 1e6, "B": 1e9}


def text_of(name):
    return (launch._shipped_folder() / name).read_text()


def given(name):
    """What `name`, a model's file, asks for."""
    return [*GIVEN, *(["NUM_CLASSES=4"] if "NUM_CLASSES = %gin.REQUIRED" in text_of(name) else [])]


def model(*files):
    return launch.make_plan("train", [*files, "runs/pretrain.gin"], given(files[0])).arguments["model"]


def is_rounded(text, count):
    """True when `text`, such as 292.1M, is `count` rounded to its digits."""
    number, unit = re.fullmatch(r"([\d.]+)([MB])", text).groups()
    return f"{count / MILLION[unit]:.{len(number.partition('.')[2])}f}" == number


def test_all_files_are_known():
    assert len(MODELS) == 19 and len(ATTENTIONS) == 23 and len(RUNS) == 11 and len(TABLES) == 10
    assert len(launch.shipped_files()) == len(MODELS + ATTENTIONS + RUNS + EXPERIMENTS)


@pytest.mark.parametrize("name", launch.shipped_files())
def test_the_head_comment_says_how_to_use_it(name):
    head = text_of(name).partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    if name not in INCLUDED:
        for word in ("Must be given:", "Often changed:", "Command:", "Result:"):
            assert word in head, word
        command = head.partition("Command:")[2].partition("Result:")[0]
        assert f"--gin_file={name}" in command
        assert all(file in launch.shipped_files() for file in re.findall(r"--gin_file=(\S+)", command))


@pytest.mark.parametrize("name", [name for name in launch.shipped_files() if name not in INCLUDED])
def test_the_command_of_the_head_comment_is_right(name):
    """A run's is complete; a model's and an attention's lack nothing but what the user must give."""
    lines = re.sub(r"\\\n#", "", text_of(name)).partition("Command:")[2].splitlines()[0]
    *_, command = lines.partition("synthesizer_jax ")
    words = shlex.split(command)
    files = [word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file=")]
    flags = [word.removeprefix("--gin.") for word in words if word.startswith("--gin.")]
    assert set(words) == {words[0], *(f"--gin_file={f}" for f in files), *(f"--gin.{f}" for f in flags)} | (
        {"--dry_run"} & set(words)
    )
    if name.startswith(("models/", "attention/")):
        with pytest.raises(ValueError) as caught:
            launch.make_plan(words[0], files, flags)
        faults = str(caught.value).splitlines()[1:]
        assert all("missing: " in fault for fault in faults) and len(faults) == len(GIVEN)
    else:
        launch.make_plan(words[0], files, flags)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in INCLUDED])
def test_a_model_has_the_parameters_that_its_comment_says(name):
    said = re.search(r"trained parameters: V (\S+), R (\S+), R\+V ([\d.]+[MB])", text_of(name)).groups()
    for letters, count in zip(("V", "R", "R+V"), said, strict=True):
        config = model(name, f"attention/{letters}.gin")
        assert is_rounded(count.rstrip(","), sj.count_parameters(config)), letters


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_builds_and_has_the_parameters_that_its_comment_says(name):
    config = model("models/paper_c4_base.gin", name)
    said = re.search(r"has ([\d.]+M) trained parameters", text_of(name)).group(1)
    assert is_rounded(said, sj.count_parameters(config))
    small = model("models/t5_tiny.gin", name)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters.abstract(small))
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    logits = jax.eval_shape(lambda p, x, y: parameters.bind(small, *p)(x, y), shapes, tokens, tokens)
    assert logits.shape == (2, 16, small.vocab_size)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if "_" not in name])
def test_an_attention_is_named_by_its_notation(name):
    notation = name.removeprefix("attention/").removesuffix(".gin")
    assert model("models/t5_tiny.gin", name) == sj.t5_tiny(notation)


def recipe(name):
    """(command, files, flags) that `name` is part of."""
    checkpoint = 'CHECKPOINT_PATH="runs/x"'
    match name.split("/"):
        case ["models", _]:
            return "train", [name, "runs/pretrain.gin"], given(name)
        case ["attention", _]:
            return "train", ["models/t5_tiny.gin", name, "runs/pretrain.gin"], GIVEN
        case ["runs", "evaluate.gin" | "infer.gin" as file]:
            return file.removesuffix(".gin"), [name], [*GIVEN[1:3], checkpoint]
        case ["runs", "costs.gin"]:
            return "costs", ["models/t5_tiny.gin", name], GIVEN[2:3]
        case ["runs", "compile.gin"]:
            return "compile", ["models/t5_tiny.gin", name], ['TOPOLOGY="cpu:8"', *GIVEN[2:4]]
        case ["runs", "quickstart.gin"]:
            return "train", [name], GIVEN[:1]
        case ["runs", "finetune.gin"]:
            return "train", ["models/t5_tiny.gin", name], [*GIVEN, f"INITIAL_{checkpoint}"]
        case ["runs", "classify.gin"]:
            return "train", ["models/classifier_tiny.gin", name], [*GIVEN, "NUM_CLASSES=4"]
        case ["runs", _]:
            return "train", ["models/t5_tiny.gin", name], GIVEN
        case ["experiments", "quickstart.gin"]:
            return "reproduce", [name], []
        case ["experiments", table, row]:
            files = [name] if row != "mini.gin" else [f"experiments/{table}/R+V.gin", name]
            return "train", files, [GIVEN[0], *([f"INITIAL_{checkpoint}"] if table == "en_mix" else [])]


@pytest.mark.parametrize("name", [name for name in launch.shipped_files() if name not in INCLUDED])
def test_the_operative_configuration_parses_again(name, tmp_path):
    command, files, flags = recipe(name)
    first = launch.make_plan(command, files, flags)
    path = tmp_path / "config.gin"
    path.write_text(first.config)
    assert launch.make_plan(command, [str(path)], []).config == first.config


# The tables of the paper

ROWS = {  # the rows of each table in the paper, and what we add
    "c4": "V R D FR R+V D+V LightConv DynConv",
    "en_mix": "V R D R+V D+V",
    "wmt14_en_de": "V fixedR R FR D FD R+D D+V R+V",
    "wmt14_en_fr": "V fixedR R FR D FD R+D D+V R+V",
    "multi30k": "V R D R+V D+V",
    "lm1b": "V fixedR R FR D FD R+D D+V R+V",
    "cnn_dailymail": "V R D R+V D+V",
    "personachat": "V R D R+V D+V",
    "ag_news": "V Linformer FR FR+V R+V",
    "movie_reviews": "V Linformer FR FR+V R+V",
}


def experiment(name, *more):
    _, files, flags = recipe(name)
    return launch.make_plan("train", [*files, *more], flags).arguments


def test_each_table_has_its_rows():
    found = {
        table: {name.rpartition("/")[2] for name in EXPERIMENTS if name.startswith(f"{table}/")} for table in TABLES
    }
    assert found == {
        f"experiments/{table}": {f"{row}.gin" for row in [*rows.split(), "mini", "table"]}
        for table, rows in ROWS.items()
    }


@pytest.mark.parametrize("table", ROWS)
def test_the_rows_of_a_table_differ_in_attention_and_what_it_needs_alone(table):
    runs = {row: experiment(f"experiments/{table}/{row}.gin") for row in ROWS[table].split()}
    models = {row: run.pop("model") for row, run in runs.items()}
    assert all(run == runs["V"] for run in runs.values())
    assert len(set(models.values())) == len(models)
    free = {"encoder_attention", "decoder_attention", "heads", "head_dim", "learned_positions", "mlp_features"}
    for row, config in models.items():
        changed = {f for f in vars(config) if getattr(config, f) != getattr(models["V"], f)}
        assert changed <= (
            free if table in ("c4", "en_mix") else free - {"heads", "head_dim", "learned_positions", "mlp_features"}
        ), row


@pytest.mark.parametrize("row, count", [("V", "223"), ("R", "254"), ("R+V", "292"), ("D", "224"), ("D+V", "243"), ("LightConv", "224"), ("DynConv", "257")])  # fmt: skip
def test_the_c4_rows_have_the_papers_numbers_of_parameters(row, count):
    assert f"{sj.count_parameters(experiment(f'experiments/c4/{row}.gin')['model']) / 1e6:.0f}" == count


@pytest.mark.parametrize(
    "name", [f"experiments/{table}/{row}.gin" for table, rows in ROWS.items() for row in rows.split()]
)
def test_a_row_builds_at_its_lengths_in_full_and_in_small(name):
    for more in ((), (name.rpartition("/")[0] + "/mini.gin",)):
        run = experiment(name, *more)
        config = run["model"]
        trained, fixed = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), parameters.abstract(config))
        shapes = config.batch.shapes(2, run["task_feature_lengths"], run.get("pack", True))
        inputs = {
            n: jax.ShapeDtypeStruct(s, "int32")
            for n, s in shapes.items()
            if n in (*config.batch.inputs, *config.batch.packing)
        }
        logits = jax.eval_shape(lambda p, f, batch: parameters.bind(config, p, f)(**batch), trained, fixed, inputs)
        assert logits.shape[0] == 2
        if more:
            assert sj.count_parameters(config) < 12e6 and run["train_steps"] <= 1000


@pytest.mark.parametrize("table", ROWS)
def test_an_experiments_file_serves_evaluation_too(table):
    plan = launch.make_plan(
        "evaluate", [f"experiments/{table}/R+V.gin", "runs/evaluate.gin"], ['CHECKPOINT_PATH="runs/x"']
    )
    assert plan.arguments["mixture_or_task_name"] == experiment(f"experiments/{table}/R+V.gin")["mixture_or_task_name"]


def test_every_row_says_the_papers_number():
    """Of PAPER's tables those that were read by hand, not by the script that wrote the files."""
    for name, number in {
        "wmt14_en_de/R+V": "28.47",
        "lm1b/R": "40.60",
        "c4/D+V": "1.832",
        "ag_news/FR+V": "89.13",
    }.items():
        assert f" {number};" in text_of(f"experiments/{name}.gin")
