"""Training throughput with `sync=`: an LSTM language model and a DeepFM, in launched processes behind links, beside
PyTorch's DDP.

Both train with Adagrad on the ids of `sparse.data`. `workload` gives the step that is measured: another model is a
matter of another entry.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.sparse import data
from benchmarks.sparse.launch import Answers, Measured, others_text, over_workers, run_workers

WHOLE = "auto, tables whole on each worker"  # the scheme is chosen, and the layout is not
AUTO = "auto"  # the layout is chosen, too
LAYOUT = {"rules": "data_parallel"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dense": LAYOUT,
    **{scheme: {**LAYOUT, "sync": scheme} for scheme in ("all_gather", "blocks", "row_exchange")},
    WHOLE: {**LAYOUT, "sync": "auto"},
    AUTO: {"rules": "auto", "sync": "auto", "uneven": "pad"},
}
TORCH_DENSE, TORCH_SPARSE = "PyTorch DDP, dense gradients", "PyTorch DDP, sparse gradients"
TORCH_ALONE = "PyTorch, each worker for itself"
THREADS = (1, 2)  # of a PyTorch worker, the faster of which is its rival
ALONE = "each worker for itself"  # no exchange: no scheme is faster
MODELS = ("lstm", "deepfm")
BPTT, HIDDEN = data.BPTT, 32  # tokens of a sequence; width of the LSTM
HEAD = (64, 32)  # of the DeepFM
ROUNDS, STEPS, WARM = 4, 3, 5  # three steps are observed, the fourth compiles
OBSERVED, TIMED = 3, 4  # batches: those that capacities come from are not timed
GOALS_AT, LEAST_OVER_DENSE, LEAST_OVER_BLOCKS = "200mbit", 3.1, 2.48
LEAST_OVER_TORCH, MOST_OVER_ALONE = {"lstm": 1.3, "deepfm": 1.5}, 1.15  # or: one of both is met at every rate


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained. `init(key)` -> state; `step(state, batch)` -> (state, metrics); `batch(step, worker, workers)`
    -> one worker's arrays, leading dim `examples`."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]
    batch: Callable[[int, int, int], dict[str, np.ndarray]]
    examples: int


def workload(name: str, data_dir: pathlib.Path) -> Training:
    """A model with its data by name."""
    return {"lstm": _lstm, "deepfm": _deepfm}[name](data_dir)


def lstm_batch(data_dir: pathlib.Path) -> tuple[Callable[[int, int, int], dict[str, np.ndarray]], data.Workload]:
    """1024 sequences of 20 tokens of a worker, and for each 8 words to tell them from, which makes 8192."""
    table = data.lm1b(data_dir, "softmax")

    def batch(step: int, worker: int, num_workers: int) -> dict[str, np.ndarray]:
        ids = table.ids(step, worker, num_workers)
        tokens = ids[: data.TOKENS].reshape(-1, BPTT)
        return {
            "tokens": tokens,
            "labels": np.roll(tokens, -1, axis=1),
            "negatives": ids[data.TOKENS :].reshape(len(tokens), -1),
        }

    return batch, table


def deepfm_batch(data_dir: pathlib.Path) -> tuple[Callable[[int, int, int], dict[str, np.ndarray]], data.Workload]:
    """1024 examples of a worker; what was clicked follows from the ids, so that there is something to learn."""
    table = data.criteo(data_dir)

    def batch(step: int, worker: int, num_workers: int) -> dict[str, np.ndarray]:
        ids = table.ids(step, worker, num_workers).reshape(data.CRITEO_ROWS, -1)
        return {"ids": ids, "clicked": (ids[:, 0] % 2).astype(np.float32)}

    return batch, table


def _lstm(data_dir: pathlib.Path) -> Training:
    import jax
    import jax.numpy as jnp

    batch, table = lstm_batch(data_dir)
    rows, width = table.num_rows, table.width

    def init(key: Any) -> Any:
        shapes = {
            "embedding": (rows, width),
            "softmax": (rows, width),
            "lstm": (width + HIDDEN, 4 * HIDDEN),
            "projection": (HIDDEN, width),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: 0.1 * jax.random.normal(one, shape) for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss_fn(params: Any, batch: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            hidden, memory = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, hidden], axis=-1) @ params["lstm"], 4, axis=-1)
            memory = jax.nn.sigmoid(f + 1.0) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        x = params["embedding"][batch["tokens"]].swapaxes(0, 1)
        start = jnp.zeros((x.shape[1], HIDDEN))
        _, hidden = jax.lax.scan(cell, (start, start), x)
        hidden = hidden.swapaxes(0, 1) @ params["projection"]
        # One lookup of all rows: with two the dense gradient is all-reduced twice.
        rows = params["softmax"][jnp.concatenate([batch["labels"], batch["negatives"]], axis=1)]
        true = jnp.sum(hidden * rows[:, :BPTT], axis=-1)
        false = jnp.einsum("btd,bsd->bts", hidden, rows[:, BPTT:])
        return jnp.mean(jax.nn.logsumexp(jnp.concatenate([true[..., None], false], axis=-1), axis=-1) - true)

    return _with_adagrad(init, loss_fn, batch, data.TOKENS // BPTT)


def _deepfm(data_dir: pathlib.Path) -> Training:
    import jax
    import jax.numpy as jnp

    batch, table = deepfm_batch(data_dir)
    sizes = (26 * table.width, *HEAD, 1)

    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(sizes) + 1)
        head = {
            f"w{k}": jax.random.normal(keys[k], (a, b)) / a**0.5
            for k, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))
        }
        tables = {
            "factors": 0.05 * jax.random.normal(keys[-1], (table.num_rows, table.width)),
            "linear": jnp.zeros((table.num_rows, 1)),
        }
        return {**tables, **head}

    def loss_fn(params: Any, batch: Any) -> Any:
        factors = params["factors"][batch["ids"]]
        pairs = 0.5 * jnp.sum(jnp.sum(factors, axis=1) ** 2 - jnp.sum(factors**2, axis=1), axis=-1)
        hidden = factors.reshape(factors.shape[0], -1)
        for k in range(len(sizes) - 1):
            hidden = (jax.nn.relu(hidden) if k else hidden) @ params[f"w{k}"]
        logit = jnp.sum(params["linear"][batch["ids"]], axis=(1, 2)) + pairs + hidden[:, 0]
        return jnp.mean(jax.nn.softplus(logit) - batch["clicked"] * logit)

    return _with_adagrad(init, loss_fn, batch, data.CRITEO_ROWS)


def _with_adagrad(init_params: Callable, loss_fn: Callable, batch: Callable, examples: int) -> Training:
    import optax

    import splitjax

    tx = optax.adagrad(0.05, initial_accumulator_value=0.0)  # as torch's

    def init(key: Any) -> Any:
        params = init_params(key)
        return {"params": params, "opt": tx.init(params)}

    def step(state: Any, batch: Any) -> Any:
        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Training(init, step, batch, examples)


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    python = None if options.torch_python is None else str(options.torch_python.absolute())
    return {
        f"end_to_end, {n} workers, {link}": {"num_workers": n, "link": link, "torch_python": python}
        for n in options.workers for link in options.links
    }  # fmt: skip


def section(quick: bool, data_dir: pathlib.Path, num_workers: int, link: str, torch_python: str | None = None) -> Any:
    """The section of one number of workers and one link."""
    models = MODELS[1:] if quick else MODELS
    settings = {
        "models": models,
        "rounds": 1 if quick else ROUNDS,
        "steps": 1 if quick else STEPS,
        "data_dir": str(data_dir),
    }
    answers = run_workers("sparse.end_to_end", settings, num_workers, link)
    beside, note = None, "PyTorch's DDP was not measured: no `--torch-python PATH` was given."
    if torch_python is not None:
        try:
            beside, note = run_workers("sparse.torch_ddp", settings, num_workers, link, python=torch_python), ""
        except RuntimeError as error:  # what was measured before stays
            note = f"**PyTorch's DDP failed: {error}**"
    return report(answers, beside, note, num_workers, link)


def report(answers: Answers, beside: Answers | None, note: str, num_workers: int, link: str) -> Any:
    """What the workers measured, as a section."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    lines, goals = (
        [
            f"{num_workers} processes of one thread on one machine behind links of {link}; `splitjax.parallelize(step,"
            f" mesh={{'data': {num_workers}}}, sync=...)`, Adagrad. lstm: {data.TOKENS // BPTT} sequences of {BPTT}"
            f" tokens and {data.NEGATIVES} negatives of a worker; deepfm: {data.CRITEO_ROWS} examples of a worker."
            " All ways take turns on the same batches, none of which was among those that were observed."
            f" DDP trains the same model with the same ids in processes of its own, behind the same links, with"
            f" {' and '.join(map(str, THREADS))} threads a worker. *{ALONE[0].upper()}{ALONE[1:]}*: the same step"
            f' without any exchange. *{AUTO[0].upper()}{AUTO[1:]}*: `rules="auto", sync="auto", uneven="pad"`: of the'
            " layout and the scheme of a table both are chosen. All other ways have tables whole on each worker."
            f" {others_text(answers.others)} {note}".rstrip(),
            "",
        ],
        [],
    )
    for model, facts in answers.workers[0]["models"].items():
        torch = {} if beside is None else {
            way: _over(beside, model, way) for way in beside.workers[0]["models"][model]["ways"]
        }  # fmt: skip
        found = {**torch, **{way: _over(answers, model, way) for way in facts["ways"]}}
        rival = min((took.seconds for way, took in torch.items() if way.startswith(TORCH_SPARSE)), default=None)
        dense = found["dense"].seconds
        out = []
        for way, took in found.items():
            num = facts["examples"] * num_workers
            out.append(
                [
                    way,
                    f"{num / took.seconds:.0f}",
                    "" if rival is None else f"**{rival / took.seconds:.2f}**",
                    f"{dense / took.seconds:.2f}",
                    f"{1e3 * took.seconds:.0f}",
                    f"{1e3 * took.low:.0f} to {1e3 * took.high:.0f}",
                    f"{1e3 * took.cpu:.0f}",
                    "" if took.sent is None else f"{took.sent / 1e6:.2f}",
                    facts["chosen"].get(way, ""),
                ]
            )
        titles = [
            "",
            "examples/s",
            "over PyTorch, sparse",
            "over dense",
            "step, ms",
            "quartiles",
            "processor time of a worker, ms",
            "MB sent by the busiest worker",
            "schemes of the tables",
        ]
        lines += [
            f"### {model}",
            "",
            f"Parameters: {facts['parameters']}.",
            "",
            *table(titles, out),
            "",
            f"Loss of the first and the last step: {facts['losses'][0]:.4f}, {facts['losses'][1]:.4f}. The first loss"
            f" of *{AUTO}*, which chose the layout {facts['layout']}, differs by {facts['first_losses_apart']:.1e} of"
            " it.",
            "",
        ]
        goals += _goals(f"{model}, {num_workers} workers, {link}", model, found, rival)
        if link == GOALS_AT:
            for way, limit in (("dense", LEAST_OVER_DENSE), ("blocks", LEAST_OVER_BLOCKS)):
                goals.append(
                    Goal(
                        f"{model}, {num_workers} workers, {link}: auto over {way}",
                        found[way].seconds / found["auto"].seconds,
                        limit,
                        False,
                        ".2f",
                    )
                )
    return Section(f"Training end to end: {num_workers} workers, {link}", lines, goals)


def _goals(name: str, model: str, found: dict[str, Measured], rival: float | None) -> list[Any]:
    """`auto` against the faster of PyTorch's sparse workers; where that is missed, against no exchange at all."""
    from benchmarks.splitbrain.common import Goal

    auto, alone = found["auto"].seconds, found[ALONE].seconds
    near = Goal(f"{name}: auto over each worker for itself", auto / alone, MOST_OVER_ALONE, True, ".2f")
    if rival is None:
        return [near]
    ahead = Goal(f"{name}: auto over PyTorch's sparse DDP", rival / auto, LEAST_OVER_TORCH[model], False, ".2f")
    return [near if near.ok and not ahead.ok else ahead]


def _over(answers: Answers, model: str, way: str) -> Measured:
    return over_workers([worker["models"][model]["ways"][way] for worker in answers.workers])


# The process of a worker.


def _work(settings: dict[str, Any]) -> None:
    from benchmarks.sparse.launch import Team

    team = Team(settings)
    answer = {
        "models": {model: _train(model, settings, team, number == 0) for number, model in enumerate(settings["models"])}
    }
    team.finish(answer)


def _train(model: str, settings: dict[str, Any], team: Any, is_first: bool) -> dict[str, Any]:
    """All ways whose tables are whole train one state in turns: they compute the same numbers, and one state of 400 MB
    is enough."""
    import jax

    import splitjax

    made = workload(model, pathlib.Path(settings["data_dir"]))
    one = made.batch(0, team.rank, team.count)
    example = {
        name: jax.ShapeDtypeStruct((team.count * made.examples, *array.shape[1:]), array.dtype)
        for name, array in one.items()
    }
    steps = {way: splitjax.parallelize(made.step, mesh={"data": team.count}, **OPTIONS[way]) for way in OPTIONS}
    # By layout: the ways that keep tables whole go on with one state, which their steps donate to each other.
    key, whole = jax.random.key(0), next(iter(OPTIONS))
    states = {way: steps[way].init(made.init, key, example=(example,)) for way in (whole, AUTO)}
    layout = steps[whole].shardings(states[whole], example)[1]
    by_itself = _by_itself(made, team)
    batches = [
        {
            name: jax.make_array_from_process_local_data(layout[name], array)
            for name, array in made.batch(number, team.rank, team.count).items()
        }
        for number in range(OBSERVED + TIMED)
    ]
    losses: dict[str, list[float]] = {way: [] for way in states}

    def run(way: str, number: int) -> None:
        if way == ALONE:
            by_itself(number)
            return
        own = way if way in states else whole
        states[own], metrics = steps[way](states[own], batches[number])
        jax.block_until_ready(states[own])
        losses[own].append(float(metrics["loss"]))

    every = (*OPTIONS, ALONE)
    for way in every:
        for number in range(1 if way == "dense" else WARM):
            run(way, number)
        team.say(
            f"{model}, {way}: {1e3 * team.turn(lambda number, way=way: run(way, OBSERVED), 1)['seconds']:.0f} ms a step"
        )
    if is_first:
        team.begin()
    turns: dict[str, list[Any]] = {way: [] for way in every}
    for number in range(settings["rounds"]):
        for way in every[number % len(every) :] + every[: number % len(every)]:
            num_steps = 1 if way == "dense" else settings["steps"]
            unseen = lambda step, way=way, first=number * num_steps: run(way, OBSERVED + (first + step) % TIMED)
            turns[way].append(team.turn(unseen, num_steps))
    chosen = {
        way: ", ".join(sorted({sync.scheme for sync in step.plan(states.get(way, states[whole]), example).syncs}))
        for way, step in steps.items()
        if way != whole
    }
    parameters = ", ".join(f"{name} {' x '.join(map(str, one.shape))}" for name, one in states[whole]["params"].items())
    return {
        "ways": turns,
        "examples": made.examples,
        "parameters": parameters,
        "chosen": chosen,
        "losses": [losses[whole][0], losses[whole][-1]],
        "first_losses_apart": abs(losses[AUTO][0] / losses[whole][0] - 1),
        "layout": steps[AUTO].choice.best.name,
    }


def _by_itself(made: Training, team: Any) -> Callable[[int], None]:
    """The same step on this process's own device alone, with a state of its own: a table's rows are updated as by an
    exchange, and none are exchanged."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import splitjax

    mesh = Mesh(np.array(jax.local_devices()[:1]), ("data",))
    step = splitjax.parallelize(made.step, mesh=mesh, rules="data_parallel", sync="row_exchange")
    batches = [made.batch(number, team.rank, team.count) for number in range(OBSERVED + TIMED)]
    state = [step.init(made.init, jax.random.key(0), example=(batches[0],))]

    def run(number: int) -> None:
        state[0], _ = step(state[0], batches[number % len(batches)])
        jax.block_until_ready(state[0])

    return run


if __name__ == "__main__":
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))
