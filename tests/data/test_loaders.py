"""Loaders of other packages: they go on where they were, in any number of processes."""

from __future__ import annotations

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax import data, runtime
from splitjax.data import BatchSampler, LoaderPosition, Position, RowsOfBatches, resumable
from splitjax.errors import CheckpointError, DataError
from splitjax.runtime.checkpoint.options import Restored

grain = pytest.importorskip("grain")


def dataset(size=40, batch_size=8, seed=3):
    return grain.MapDataset.source(np.arange(size)).shuffle(seed=seed).repeat().batch(batch_size, drop_remainder=True)


def loader(size=40):
    sampler = grain.samplers.IndexSampler(size, shuffle=True, seed=1, num_epochs=3)
    return grain.DataLoader(
        data_source=np.arange(size),
        sampler=sampler,
        operations=[grain.transforms.Batch(8, drop_remainder=True)],
    )


@pytest.mark.parametrize("make", [dataset, lambda: dataset().to_iter_dataset(), loader])
def test_grain_goes_on_behind_the_batch_of_a_position(make):
    whole = list(itertools.islice(resumable(make()), 9))
    for position, _ in whole[:2]:
        assert json.loads(json.dumps(position.to_json())) == position.to_json()
    saved = json.dumps(whole[3][0].to_json())
    for start in (whole[3][0], json.loads(saved), LoaderPosition.from_json(json.loads(saved))):
        resumed = list(itertools.islice(resumable(make(), start), 5))
        assert [position for position, _ in resumed] == [position for position, _ in whole[4:]]
        np.testing.assert_array_equal([batch for _, batch in resumed], [batch for _, batch in whole[4:]])


def test_a_position_does_not_change_with_the_next_batch():
    """An iterator may return the dict that it counts in."""

    class Counting:
        def __init__(self):
            self.state = {"next": 0}

        def __iter__(self):
            return self

        def __next__(self):
            self.state["next"] += 1
            return np.zeros(2)

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    first, second = (position for position, _ in itertools.islice(resumable(Counting()), 2))
    assert (first.state, second.state) == ({"next": 1}, {"next": 2})


@pytest.mark.parametrize("state", [{"next_index": 3}, [1, None, "x"], b'{"version": 2}', b"\xff\x00"])
def test_positions_come_back_from_json(state):
    position = LoaderPosition(state)
    assert LoaderPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


@pytest.mark.parametrize("value", [None, 3, {"epoch": 0, "batch": 1}, {"loader_text": 3}, {"loader_base64": "!"}, {}])
def test_what_is_no_position_of_a_loader_is_refused(value):
    with pytest.raises(DataError, match="not the position of a loader"):
        LoaderPosition.from_json(value)


def test_loaders_that_do_not_say_where_they_are_and_strange_positions_are_refused():
    with pytest.raises(DataError, match="does not say where it is"):
        resumable([np.zeros(3)])
    position = list(itertools.islice(resumable(loader()), 1))[0][0]
    with pytest.raises(DataError, match="does not go on where the position says"):
        resumable(loader(size=48), position)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_rows_of_batches_are_the_batches_of_one_process(num_processes):
    examples = grain.MapDataset.source(np.arange(37)).shuffle(seed=5).repeat(2)
    whole = [np.asarray([examples[8 * k + row] for row in range(8)]) for k in range(9)]
    per = 8 // num_processes
    parts = []
    for process in range(num_processes):
        mine = RowsOfBatches(examples, 8, np.arange(process * per, (process + 1) * per))
        assert len(mine) == 9 * per and mine[-1] == mine[len(mine) - 1] and mine[0:2] == [mine[0], mine[1]]
        batches = grain.MapDataset.source(mine).batch(per).to_iter_dataset()
        parts.append(list(resumable(batches)))
    positions = [[position for position, _ in part] for part in parts]
    assert all(other == positions[0] for other in positions)  # so the number of processes may change
    together = [np.concatenate([batch for _, batch in step]) for step in zip(*parts, strict=True)]
    np.testing.assert_array_equal(together, whole)
    with pytest.raises(IndexError):
        mine[len(mine)]


def test_a_batch_sampler_reads_the_order_of_a_stream():
    examples = {"x": np.arange(21)}
    rows = np.array([1, 4, 5])
    stream = list(data.stream(examples, 6, seed=2, rows=rows, num_epochs=3))
    sampler = BatchSampler(21, 6, seed=2, rows=rows, num_epochs=3)
    np.testing.assert_array_equal(list(sampler), [batch["x"] for _, batch in stream])
    assert list(sampler.positions()) == [position for position, _ in stream]
    for skipped in (1, 3, 5):
        rest = BatchSampler(21, 6, seed=2, rows=rows, num_epochs=3, start=stream[skipped - 1][0])
        np.testing.assert_array_equal(list(rest), [batch["x"] for _, batch in stream[skipped:]])
        assert list(rest.positions()) == [position for position, _ in stream[skipped:]]
    endless = BatchSampler(21, 6, seed=2)
    assert len(list(itertools.islice(endless, 50))) == 50


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BatchSampler(5, 6, seed=0), "has no full batch"),
        (lambda: BatchSampler(20, 6, seed=-1), "seed must be a whole number"),
        (lambda: BatchSampler(20, 6, seed=0, start=Position(0, 4)), "has 3 batches"),
        (lambda: BatchSampler(20, 6, seed=0, rows=np.array([6])), "whole numbers from 0 to 5"),
        (lambda: RowsOfBatches(range(20), 6, np.array([])), "whole numbers from 0 to 5"),
        (lambda: RowsOfBatches(range(5), 6), "has no full batch"),
    ],
)
def test_bad_numbers_are_named(make, words):
    with pytest.raises(DataError, match=words):
        make()


def test_pytorch_reads_by_a_batch_sampler():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, number):
            return {"x": np.float32(number**2)}

    collate = lambda examples: {"x": np.stack([example["x"] for example in examples])}
    sampler = BatchSampler(20, 4, seed=1, num_epochs=2)
    batches = torch.utils.data.DataLoader(Squares(), batch_sampler=sampler, collate_fn=collate, num_workers=2)
    read = list(zip(sampler.positions(), batches, strict=True))
    np.testing.assert_array_equal([batch["x"] for _, batch in read], [np.square(n, dtype="f") for n in sampler])
    assert read[4][0] == Position(1)


def train_step():
    @splitjax.parallelize(mesh={"data": 4}, rules="data_parallel")
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grads}, {"loss": loss}

    return step


def rows_of(number):
    return {"x": np.random.default_rng(int(number)).normal(size=3).astype("f")}


class Rows(grain.transforms.Map):
    def map(self, element):
        return rows_of(element)


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_a_run_on_grain_resumes_bit_for_bit(tmp_path, kind):
    """The state of grain's iterator is in the checkpoint; what was interrupted equals what was not."""

    def batches(start=None):
        if kind == "dataset":
            examples = grain.MapDataset.source(np.arange(40)).shuffle(seed=3).map(rows_of).repeat()
            return resumable(examples.batch(8).to_iter_dataset(), start)
        sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=1)
        operations = [Rows(), grain.transforms.Batch(8)]
        return resumable(grain.DataLoader(data_source=np.arange(40), sampler=sampler, operations=operations), start)

    init = lambda: {"w": jnp.ones(3)}
    example = jax.eval_shape(lambda: {"x": jnp.zeros((8, 3))})

    def run(folder, *ends):
        for end in ends:
            step = train_step()
            with runtime.Checkpoints(runtime.CheckpointOptions(folder)) as checkpoints:
                if checkpoints.newest_good() is None:
                    state, start, done = step.init(init, example=(example,)), None, 0
                else:
                    restored = checkpoints.restore(step.abstract_state(init, example=(example,)))
                    state, start, done = restored.state, restored.position, restored.step
                    assert list(start) == ["loader" if kind == "dataset" else "loader_text"]
                options = runtime.LoopOptions(num_steps=end, batch_size=8)
                outcome = runtime.train(
                    step, state, batches(start), options, first_step=done + 1, checkpoints=checkpoints
                )
        return np.asarray(outcome.state["w"])

    whole, interrupted = run(tmp_path / "whole", 7), run(tmp_path / "parts", 3, 7)
    assert whole.tobytes() == interrupted.tobytes()


def test_positions_of_another_number_of_processes_are_refused_unless_they_agree():
    restored = Restored(1, {}, {"position": {"loader": 0}}, {}, ())
    assert restored.position == {"loader": 0}
    alike = Restored(1, {}, {}, {}, (), own=({"loader": 4}, {"loader": 4}))
    assert alike.position == {"loader": 4}
    apart = Restored(1, {}, {}, {}, (), own=({"loader": 4}, {"loader": 5}))
    with pytest.raises(CheckpointError, match="there were 2 processes"):
        _ = apart.position
