"""A worker process of `python -m benchmarks sparse --torch-python PATH`: the same models under PyTorch's
DistributedDataParallel, on gloo.

Needs torch and numpy, and nothing of splitjax: the launcher's variables say where the others are.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sparse import end_to_end as models

_PORT = 29500
_RATE = 0.05  # of Adagrad


class LSTM(nn.Module):
    """As `sparse.end_to_end`'s."""

    def __init__(self, num_rows: int, width: int, sparse: bool):
        super().__init__()
        self.embedding, self.softmax = (nn.Embedding(num_rows, width, sparse=sparse) for _ in range(2))
        self.lstm = nn.LSTM(width, models.HIDDEN, batch_first=True)
        self.projection = nn.Linear(models.HIDDEN, width, bias=False)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.projection(self.lstm(self.embedding(batch["tokens"]))[0])
        rows = self.softmax(torch.cat([batch["labels"], batch["negatives"]], dim=1))
        num_labels = batch["labels"].shape[1]
        true = (hidden * rows[:, :num_labels]).sum(-1)
        false = torch.einsum("btd,bsd->bts", hidden, rows[:, num_labels:])
        return (torch.logsumexp(torch.cat([true[..., None], false], dim=-1), dim=-1) - true).mean()


class DeepFM(nn.Module):
    """As `sparse.end_to_end`'s."""

    def __init__(self, num_rows: int, width: int, sparse: bool):
        super().__init__()
        self.factors, self.linear = (
            nn.Embedding(num_rows, width, sparse=sparse),
            nn.Embedding(num_rows, 1, sparse=sparse),
        )
        sizes = (26 * width, *models.HEAD, 1)
        self.head = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        factors = self.factors(batch["ids"])
        pairs = 0.5 * (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(-1)
        hidden = factors.flatten(1)
        for k, layer in enumerate(self.head):
            hidden = layer(torch.relu(hidden) if k else hidden)
        logit = self.linear(batch["ids"]).sum((1, 2)) + pairs + hidden[:, 0]
        return (nn.functional.softplus(logit) - batch["clicked"] * logit).mean()


_MODELS = {"lstm": (LSTM, models.lstm_batch), "deepfm": (DeepFM, models.deepfm_batch)}


def _train(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    make, batch_of = _MODELS[name]
    batch, table = batch_of(pathlib.Path(settings["data_dir"]))
    rank, count = dist.get_rank(), dist.get_world_size()
    batches = [
        {key: _tensor(array) for key, array in batch(number, rank, count).items()}
        for number in range(models.OBSERVED, models.OBSERVED + models.TIMED)
    ]
    ways = {}
    kinds = [(models.TORCH_DENSE, False, True, models.THREADS[:1])]
    kinds += [(models.TORCH_SPARSE, True, True, models.THREADS), (models.TORCH_ALONE, True, False, models.THREADS)]
    for way, sparse, together, threads in kinds:
        for number in threads:
            torch.set_num_threads(number)
            turns, run = [], _runner(make(table.num_rows, table.width, sparse), batches, together)
            run(0)
            first = _turn(run, 1)["seconds"]
            steps = 1 if _largest(first) > 2 else settings["steps"]
            named = f"{way}, {number} thread{'s' * (number > 1)}"
            if rank == 0:
                print(f"{name}, {named}: {1e3 * first:.0f} ms a step", flush=True)
            for _ in range(settings["rounds"]):
                turns.append(_turn(run, steps))
            ways[named] = turns
    return {"ways": ways}


def _runner(model: nn.Module, batches: list[dict[str, torch.Tensor]], together: bool) -> Any:
    """`together`: whether gradients are exchanged."""
    wrapped = DistributedDataParallel(model) if together else model
    optimizer = torch.optim.Adagrad(model.parameters(), lr=_RATE)

    def run(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(batches[number % len(batches)]).backward()
        optimizer.step()

    return run


def _turn(run: Any, steps: int) -> dict[str, float]:
    """As `sparse.launch.Team.turn`."""
    dist.barrier()
    before, cpu, started = _bytes_sent(), time.process_time(), time.perf_counter()
    for number in range(steps):
        run(number)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    dist.barrier()
    return {"seconds": seconds / steps, "cpu": cpu / steps, "sent": (_bytes_sent() - before) / steps}


def _largest(value: float) -> float:
    found = torch.tensor([value])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _bytes_sent() -> int:
    device = os.environ["SPLITJAX_NETWORK_DEVICE"]
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{device}:"))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)


def _main() -> None:
    settings = json.loads(sys.argv[1])
    rank, count = int(os.environ["SPLITJAX_PROCESS_ID"]), int(os.environ["SPLITJAX_NUM_PROCESSES"])
    host = os.environ["SPLITJAX_COORDINATOR"].rpartition(":")[0]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["SPLITJAX_NETWORK_DEVICE"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{_PORT}", rank=rank, world_size=count)
    answer = {"models": {name: _train(name, settings) for name in settings["models"]}}
    (pathlib.Path(settings["folder"]) / f"worker{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
