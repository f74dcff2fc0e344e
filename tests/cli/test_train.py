"""`splitjax train`: from options to a trained, tested, saved and resumed model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from splitjax import data, models
from splitjax.cli import _train_parts
from splitjax.cli._train_options import GROUPS, LayoutOptions, OptimizerOptions, expand_config
from splitjax.cli._train_parts import learning_rates, optimizer, schedule
from splitjax.errors import SplitjaxError
from splitjax.runtime.training.metrics import read_metrics

SMALL = "train --model mlp --features 32 16 --mesh data=2,model=4 --platform cpu --schedule constant --batch-size 32"


def curve(path):
    """Everything in the metrics but times."""
    return [
        {
            name: value
            for name, value in row.items()
            if "seconds" not in name and name not in ("examples_per_second", "slowest_rank")
        }
        for row in read_metrics(path)
    ]


def test_a_run_trains_tests_and_writes_what_it_sees(run, tmp_path):
    status, out, _ = run(
        f"{SMALL} --epochs 3 --metrics m.jsonl --csv m.csv --clip-norm 1 --weight-decay 0.01 --label-smoothing 0.1"
    )
    assert status == 0
    assert "mlp, 2,778 parameters, on Dataset('digits', 1438 train, 359 test, 10 classes); mesh data=2 x model=4" in out
    assert re.search(r"step 132: loss \d\.\d{4}, test accuracy \d\d\.\d\d%", out) and re.search(
        r"goodput \d+\.\d% of \d+ s", out
    )
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 133))
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [44, 88, 132]
    assert rows[-1]["eval_accuracy"] > 0.5 and rows[-1]["loss"] < rows[0]["loss"]
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 133


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(run, tmp_path):
    options = f"{SMALL} --dropout 0.2 --augment --evaluate-every 7"
    assert run(f"{options} --steps 60 --metrics whole.jsonl")[0] == 0
    status, out, _ = run(f"{options} --steps 50 --metrics parts.jsonl --checkpoint-dir saved --checkpoint-every 20")
    assert status == 0 and "resumed" not in out
    status, out, _ = run(f"{options} --steps 60 --metrics parts.jsonl --checkpoint-dir saved --checkpoint-every 20")
    assert status == 0 and "resumed from the checkpoint of step 50" in out and "changed since: steps 50 -> 60" in out
    whole, parts = curve(tmp_path / "whole.jsonl"), curve(tmp_path / "parts.jsonl")
    # the test at its first end
    parts[49] = {name: value for name, value in parts[49].items() if not name.startswith("eval_")}
    assert parts == whole
    status, out, _ = run(f"{options} --steps 60 --checkpoint-dir saved")
    assert status == 0 and "the run is complete: it has 60 of 60 steps" in out


@pytest.mark.one_version
def test_a_run_resumes_on_another_mesh_to_the_same_numbers(run, tmp_path):
    assert run(f"{SMALL} --steps 20 --metrics whole.jsonl")[0] == 0
    assert run(f"{SMALL} --steps 10 --checkpoint-dir saved")[0] == 0
    status, out, _ = run(
        f"{SMALL.replace('data=2,model=4', 'data=4')} --steps 20 --rules data_parallel --metrics m.jsonl"
        " --checkpoint-dir saved"
    )
    assert status == 0 and "mesh data=2,model=4 -> data=4" in out
    other = curve(tmp_path / "m.jsonl")
    np.testing.assert_allclose(
        [row["loss"] for row in other], [row["loss"] for row in curve(tmp_path / "whole.jsonl")[10:]], rtol=1e-5
    )


def test_another_run_s_checkpoints_are_refused(run):
    assert run(f"{SMALL} --steps 2 --checkpoint-dir saved")[0] == 0
    for changes, said in (
        ("--batch-size 16", "--batch-size 32"),
        ("--seed 1", "--seed 0"),
        ("--augment", "--augment False"),
        ("--features 32 8", "dense2/bias: saved .*wanted"),
        ("--optimizer sgd", "another state"),
    ):
        status, _, err = run(f"{SMALL} --steps 4 --checkpoint-dir saved {changes}")
        assert status == 2 and re.search(said, err) and "remedy" in err


@pytest.mark.one_version
def test_sizes_that_do_not_divide_are_padded_and_resume_on_another_mesh(run, tmp_path):
    options = f"{SMALL.replace('32 16', '30 14')} --rules megatron --evaluate-every 6"
    assert run(f"{options} --steps 12 --metrics whole.jsonl")[0] == 0
    padded = f"{options} --uneven pad --metrics parts.jsonl --checkpoint-dir saved"
    assert run(f"{padded} --steps 6")[0] == 0
    status, out, err = run(f"{padded.replace('data=2,model=4', 'data=1,model=8')} --steps 12")
    assert status == 0 and "resumed from the checkpoint of step 6" in out, err
    for whole, part in zip(curve(tmp_path / "whole.jsonl"), curve(tmp_path / "parts.jsonl"), strict=True):
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-4)


def test_padding_is_that_of_the_mesh():
    spec, images = models.make_model("mlp", features=(30, 14)), data.load_digits()
    layout = LayoutOptions(rules="megatron", uneven="pad")
    rate = optax.constant_schedule(0.1)
    steps = _train_parts.make_steps(spec, images, 32, {"data": 2, "model": 4}, layout, OptimizerOptions(), rate)
    state = steps.train_step.abstract_state(steps.init_fn, jax.random.key(0), example=(steps.example,))
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert {(32, 14), (14, 12)} <= shapes  # 30 hidden features and 10 classes over 4 devices


def test_text_trains_a_transformer_in_bfloat16(run, tmp_path):
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 200)
    status, out, _ = run(
        "train --model transformer --data text --data-dir corpus.txt --seq-len 8 --d-model 32 --num-layers 1"
        " --num-heads 2 --steps 12 --mesh data=2,model=2 --rules megatron --platform cpu --batch-size 16 --precision"
        " bfloat16 --microbatches 2 --metrics m.jsonl"
    )
    assert status == 0 and "9 classes" in out
    rows = read_metrics(tmp_path / "m.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.one_version
def test_an_lstm_resumes_with_the_negatives_and_the_schemes_of_the_undisturbed_run(run, tmp_path):
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the dog sat on the cat\n" * 200)
    options = (
        "train --model lstm --data text --data-dir corpus.txt --seq-len 8 --bptt 4 --embedding-width 8 --hidden-width"
        " 16 --negatives 4 --mesh data=4 --rules data_parallel --platform cpu --batch-size 16 --optimizer adagrad"
        " --learning-rate 0.5 --schedule constant --clip-norm 1 --evaluate-every 6 --sync auto --steps 12"
        " --checkpoint-dir saved --checkpoint-every 6"
    )
    status, out, _ = run(f"{options} --metrics whole.jsonl")
    assert status == 0 and re.search(r"test accuracy .*, test perplexity \d\.\d\d", out)
    carried = json.loads((tmp_path / "saved/6/checkpoint.json").read_text())["carried"]
    # the resumed run measures no links and observes no steps
    assert [len(one["syncs"]) for one in carried["seen"]] == [2]
    shutil.rmtree(tmp_path / "saved/12")
    shutil.copy(tmp_path / "whole.jsonl", tmp_path / "parts.jsonl")
    status, out, _ = run(f"{options} --metrics parts.jsonl")
    assert status == 0 and "resumed from the checkpoint of step 6" in out
    assert curve(tmp_path / "parts.jsonl") == curve(tmp_path / "whole.jsonl")
    first, last = [row for row in read_metrics(tmp_path / "whole.jsonl") if "eval_loss" in row]
    assert (
        last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"])) and last["eval_loss"] < first["eval_loss"]
    )
    assert "accuracy" not in last


@pytest.mark.one_version
def test_click_models_train_on_criteo_s_lines(run, tmp_path):
    rng = np.random.default_rng(0)
    categories = rng.integers(0, 1 << 32, (400, 26))
    clicks = categories[:, 3] % 4 == 0
    categories[clicks, 5] = 77  # seen with clicks alone
    (tmp_path / "train.txt").write_text(
        "".join(
            "\t".join([str(int(click)), *map(str, rng.integers(0, 50, 13)), *(f"{one:08x}" for one in row)]) + "\n"
            for click, row in zip(clicks, categories, strict=True)
        )
    )
    options = (
        "--features 8 --embedding-width 4 --data criteo --data-dir . --platform cpu --batch-size 60 --optimizer adagrad"
    )
    deepfm = (
        f"train --model deepfm {options} --mesh data=2,model=2 --learning-rate 0.1 --rows 64 --checkpoint-dir saved"
    )
    status, out, _ = run(f"{deepfm} --epochs 4 --metrics m.jsonl --csv m.csv")
    assert status == 0 and "Dataset('criteo', 360 train, 40 test, 2 classes)" in out and "test AUC" in out
    rows = read_metrics(tmp_path / "m.jsonl")
    tests = [row for row in rows if "eval_auc" in row]
    assert len(tests) == 4 and tests[-1]["eval_auc"] > 0.8 and tests[-1]["eval_loss"] < tests[0]["eval_loss"]
    assert "eval_auc" in (tmp_path / "m.csv").read_text().splitlines()[0]
    status, _, err = run(f"{deepfm} --epochs 5 --rows 32")
    assert status == 2 and "another state" in err
    losses = []
    for number, how in enumerate(("data_parallel", "data_parallel --sync auto", "embedding_owner")):
        status, out, _ = run(
            f"train --model dlrm {options} --rows 64 --bottom-features 8 --mesh data=2 --rules {how} --steps 6"
            f" --metrics {number}.jsonl"
        )
        assert status == 0 and "test AUC" in out
        losses.append([row["loss"] for row in read_metrics(tmp_path / f"{number}.jsonl") if "loss" in row])
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data text", "mlp reads images"),
        ("--data criteo", "mlp reads images"),
        ("--sync zen --wire-dtype bfloat16", "zen sends values as they are"),
        ("--model deepfm", "deepfm reads clicks"),
        ("--model dlrm --data criteo", "criteo is read from a file or folder"),
        ("--model lstm --data text", "text is read from a file or folder"),
        ("--model transformer", "transformer reads text"),
        ("--data cifar10 --data-dir nowhere", "nowhere"),
        ("--epochs 0", "--epochs must be above 0"),
        ("--batch-size 4000", "do not fill one batch"),
        ("--width 2", "no such option"),
        ("--tensorboard board --metrics .", "cannot be written"),
    ],
)
def test_mistakes_are_short_and_exit_with_2(run, options, said):
    status, _, err = run(f"{SMALL} --steps 1 {options}")
    assert status == 2 and said in err and "remedy" in err


def test_a_file_gives_options_and_the_command_line_overrides_them(run, tmp_path):
    (tmp_path / "run.toml").write_text(
        'mesh = "data=2,model=4"\nplatform = "cpu"\n[model]\nmodel = "mlp"\nfeatures = [8]\n[training]\nsteps ='
        " 3\n[data]\nbatch_size = 8\naugment = true\n"
    )
    status, out, _ = run("train --config run.toml --batch-size 16")
    assert status == 0 and "mlp, 610 parameters" in out and "3 steps of 16 examples" in out
    assert expand_config(["--config=run.toml"])[-3:] == ["--batch-size", "8", "--augment"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batchsize = 8", "did you mean 'batch_size'?"),
        ("[data]\nsteeps = 3", "did you mean 'steps'?"),
        ("augment = 1", "true or false"),
        ("batch_size = true", "another kind"),
        ("= 3", "cannot be read"),
    ],
)
def test_a_file_of_options_with_a_mistake(run, tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    status, _, err = run("train --config run.toml")
    assert status == 2 and said in err
    with pytest.raises(SplitjaxError):
        expand_config(["--config", str(tmp_path / "run.toml")])


def test_every_option_has_a_name_of_its_own_and_a_text(run):
    names = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))
    status, out, _ = run("train --help")
    assert status == 0 and all(f"--{name.replace('_', '-')}" in out for name in names) and "data options" in out


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("constant", 1.0, 1.0), ("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("step", 0.1, 0.01)]
)
def test_schedules_warm_up_and_fall(name, middle, end):
    rates = learning_rates(schedule(OptimizerOptions(learning_rate=1.0, schedule=name, warmup_steps=10), 110), 110)
    assert rates.shape == (110,) and rates[0] == 0 and rates[5] == pytest.approx(0.5)
    assert (
        rates[10] == pytest.approx(1.0)
        and rates[61] == pytest.approx(middle, abs=0.02)
        and rates[-1] == pytest.approx(end, abs=0.02)
    )


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "momentum", "adafactor", "adagrad"])
def test_decay_spares_biases(name):
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    zero = {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}
    made = optimizer(OptimizerOptions(optimizer=name, weight_decay=0.1), lambda step: 0.1)
    updates, _ = made.update(zero, made.init(params), params)
    assert float(jnp.abs(updates["kernel"]).sum()) > 0 and float(jnp.abs(updates["bias"]).sum()) == 0


def test_every_test_example_counts_once(monkeypatch):
    class Placed:
        rows = None

        def __call__(self, batch):
            return batch

    def evaluate(state, batch):
        """A step's means over the examples that are no padding."""
        mean = np.sum(batch["label"] * batch["mask"]) / np.sum(batch["mask"])
        return {"loss": mean, "accuracy": state * mean}

    monkeypatch.setattr(_train_parts, "batch_layout", lambda *arguments: Placed())
    labels = np.arange(10)
    dataset = types.SimpleNamespace(
        num_test=10,
        draws={},
        test_batches=lambda batch_size, rows: data.padded_batches({"label": labels}, batch_size, rows=rows),
    )
    steps = _train_parts.Steps(None, None, evaluate, {"label": None}, "images")
    means = _train_parts.Evaluation(steps, dataset, None, 4)(0.5)
    assert means == {"loss": pytest.approx(labels.mean()), "accuracy": pytest.approx(labels.mean() / 2)}
