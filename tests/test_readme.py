"""Every command and every Python block of the README, run as it stands there, but for shorter training."""

import pathlib
import re
import shlex

import jax
import pytest

from synthesizer_jax import tasks
from synthesizer_jax.__main__ import main

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [part.strip() for block in re.findall(r"```bash\n(.*?)```", README, re.S) for part in block.split("&&")]
OURS = "python -m synthesizer_jax "


def run(command, folder, *more):
    """The command in this process, its files in `folder`."""
    command = command.replace('"runs/', f'"{folder}/').replace("cache_dir=runs/", f"cache_dir={folder}/")
    assert main([*shlex.split(command)[3:], *more]) == 0


def test_every_command_is_known_here():
    ours = tuple(OURS + command for command in ("reproduce", "train", "evaluate", "infer", "costs", "compile", "tasks", "cache"))
    kinds = [c for c in COMMANDS if not c.startswith(ours)]
    assert kinds == ["pip install -e '.[train]'", "pip install -e '.[test]'", "pytest -n 2"]


def test_commands_about_data(tmp_path, capsys):
    """Without their data, too."""
    listed, shown, cached = [c for c in COMMANDS if c.startswith((OURS + "tasks", OURS + "cache"))]
    run(listed, tmp_path, f"--tfds_data_dir={tmp_path}")
    assert "glue_rte" in (said := capsys.readouterr().out) and "tfds build glue/rte:2.0.0" in said
    run(shown, tmp_path)
    assert "example 2, after preprocessing\n  inputs: number " in capsys.readouterr().out
    run(cached, tmp_path)
    assert (tmp_path / "cache" / "quickstart_lm" / "COMPLETED").exists()


def test_the_python_of_the_guides_runs(tmp_path):
    for guide in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", guide.read_text(), re.S):
            exec(compile(block, guide.name, "exec"), {})


def test_the_guide_to_tasks_names_every_module():
    guide = (ROOT / "docs" / "tasks.md").read_text()
    for module, names in tasks.CONTENTS.items():
        prefixes = (f"`{names[0]}`", f"`{names[0].split('_')[0]}_*`", "`super_glue_*`" if "super_glue" in module else "?")
        assert any(prefix in guide for prefix in prefixes), module


def test_the_test_command_is_what_ci_runs():
    script = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test]'" in script and "pytest -n 2" in script


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    names = {}
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        for block in re.findall(r"```python\n(.*?)```", README, re.S):
            exec(compile(block, "README.md", "exec"), names)
    assert names["y"].shape == (2, 100, 64)
    assert names["weights"].shape == (2, 4, 100, 100)
    assert names["out"].shape == (2, 100, 4, 16)
    assert names["logits"].shape == (1, 3, 32128)
    assert (tmp_path / "histograms.png").read_bytes().startswith(b"\x89PNG")


def trainings(*folders):
    """The commands that train into these folders of runs/."""
    commands = [c for c in COMMANDS if c.startswith(OURS + "train")]
    assert len(commands) == 4
    return [next(c for c in commands if f"MODEL_DIR='\"runs/{folder}\"'" in c) for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["lm", "classifier"])
def test_language_model_and_classifier(folder, tmp_path):
    (command,) = trainings(folder)
    run(command, tmp_path, "--gin.TRAIN_STEPS=3")
    assert (tmp_path / folder / "checkpoint_3").exists()


def test_costs(tmp_path, capsys):
    (command,) = [c for c in COMMANDS if c.startswith(OURS + "costs")]
    run(command, tmp_path)
    assert "292,109,696" in capsys.readouterr().out


def test_compile(tmp_path, capsys):
    (command,) = [c for c in COMMANDS if c.startswith(OURS + "compile")]
    run(command, tmp_path)
    said = capsys.readouterr().out
    assert "cpu:8" in said and "all-gather" in said and "fsdp" in said


def test_pretrain_finetune_evaluate(tmp_path):
    pretrain, finetune = trainings("pretrained", "finetuned")
    (evaluate,) = [c for c in COMMANDS if c.startswith(OURS + "evaluate")]
    (tmp_path / "lines.txt").write_text("negation: it is not here\nnegation: it is here\n")
    run(pretrain, tmp_path, "--gin.TRAIN_STEPS=3")
    run(finetune, tmp_path, "--gin.TRAIN_STEPS=3")
    run(evaluate, tmp_path, "--gin.evaluate.num_examples=40")
    (infer,) = [c for c in COMMANDS if c.startswith(OURS + "infer")]
    run(infer, tmp_path, f'--gin.INPUT_FILE="{tmp_path}/lines.txt"')
    assert len((tmp_path / "finetuned" / "inference" / "lines-3.jsonl").read_text().splitlines()) == 2
    for name in ("config.gin", "model-info.txt", "checkpoint_3", "train"):
        assert (tmp_path / "pretrained" / name).exists(), name
    results = tmp_path / "finetuned" / "inference_eval"
    for task in ("quickstart_negation", "quickstart_number"):
        assert (results / f"{task}-3.jsonl").exists()
        assert (results / f"{task}-metrics.jsonl").exists()


def test_quickstart(tmp_path):
    (command,) = [c for c in COMMANDS if c.startswith(OURS + "reproduce")]
    short = ("--gin.PRETRAINING_STEPS=2", "--gin.FINETUNING_STEPS=2", '--gin.ATTENTIONS=("V", "R+V")')
    run(command, tmp_path, f'--gin.MODEL_DIR="{tmp_path}/quickstart"', *short)
    table = (tmp_path / "quickstart" / "comparison.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["V", "R+V"]
    assert (tmp_path / "quickstart" / "comparison.json").exists()
    assert (tmp_path / "quickstart" / "attention.png").read_bytes().startswith(b"\x89PNG")
