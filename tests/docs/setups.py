"""What the code blocks of the docs may take for granted: where a page says `train_step(state, batch)`, there is one.
Each page's blocks run in order in one namespace; what stands here runs before a block of theirs."""

from __future__ import annotations

COMMON = """
import jax, optax, pathlib, splitjax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec as P

def init_fn(key):
    hidden, embedding = jax.random.normal(key, (16, 32)), jax.random.normal(key, (64, 16))
    return {"params": {"embedding": embedding, "hidden": {"kernel": hidden}, "logits": {"kernel": jnp.ones((32, 4))}}}

def step_fn(state, batch):
    def loss_fn(params):
        hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["hidden"]["kernel"])
        return ((hidden @ params["logits"]["kernel"] - batch["y"][:, None]) ** 2).mean()

    loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": loss}

def batch_at(number):
    rng = np.random.default_rng(number)
    return {"x": rng.integers(0, 64, 64), "y": rng.normal(size=64).astype("f")}

train_step = splitjax.parallelize(step_fn, mesh={"data": 8}, rules="data_parallel")
batch, key = batch_at(0), jax.random.key(0)
batches = [batch_at(number) for number in range(2)]
state = train_step.init(init_fn, key, example=(batch,))
step, num_steps = train_step, 2
"""
# By page, by block: what runs before it.
BEFORE = {
    "data": {
        2: """
sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
batch_size = 32
""",
        4: "from splitjax import data\nimport grain",
    },
    "kernels": {
        0: 'mesh = jax.make_mesh((2, 4), ("data", "model"))',
        1: "flash_attention = jax.nn.dot_product_attention",
    },
    "launching": {
        2: "batches = iter([batch_at(number) for number in range(2)])",
        # In a run of one process nobody is asked to leave.
        3: """
from jax.experimental import multihost_utils
multihost_utils.reached_preemption_sync_point = lambda step: False
start, batches = 0, iter([batch_at(number) for number in range(2)])
""",
    },
    "partial_backpropagation": {
        1: """
step = splitjax.parallelize(step_fn, mesh={"data": 4}, rules="data_parallel")
state = step.init(init_fn, key, example=(batch,))
"""
    },
    "planning": {0: 'batch = {"x": np.zeros(64, "i4"), "y": np.zeros(64, "f")}'},
    "rules": {
        1: """
class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        made = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(32, kernel_init=made)(x)

def step_fn(state, batch):
    loss, grads = splitjax.value_and_grad(lambda params: Layer().apply(params, batch["x"]).mean())(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), loss

batch = {"x": np.zeros((32, 16), "f")}
init_fn = lambda key: Layer().init(key, batch["x"])
""",
        2: "from splitjax.primitives.operation import Linearity",
    },
    "sparse": {1: 'train_step = splitjax.parallelize(step_fn, mesh={"data": 8}, rules="data_parallel", sync="auto")'},
    "time": {
        0: """
import shutil, tests
shutil.copy(pathlib.Path(tests.__path__[0]) / "codec" / "data" / "calibration.json", "calibration.json")
""",
    },
}
# Blocks that end with one of splitjax's errors, which the page is about.
RAISES = {("troubleshooting", 0): "DonatedStateError"}
# Pages whose blocks are scripts that a test of their own runs, and looks at what they print.
SCRIPTS = {
    "README": "tests/test_docs.py",
    "quickstart": "tests/test_docs.py",
    "training": "tests/test_docs.py",
    "scheduler": "tests/test_docs.py",
    "first_day": "tests/docs/test_first_day.py",
    "frameworks": "tests/test_site.py",
    "mixed_precision": "tests/test_site.py",
    "checkpoints": "tests/runtime/checkpoint/test_checkpoint_page.py",
}
