"""Models to train: VGG, ResNet, an MLP and a small decoder Transformer, each in Flax Linen and in Flax NNX.

They are ordinary Flax models, and `make_step` makes ordinary training steps of them: nothing here knows about
parallelism. The demo, the benchmarks and the tests decorate these steps as a user would decorate their own.
"""

from splitjax.models._common import ModelError
from splitjax.models.mlp import LinenMLP, MLPConfig, NnxMLP
from splitjax.models.registry import LIBRARIES, NAMES, ModelSpec, build
from splitjax.models.resnet import LinenResNet, NnxResNet, ResNetConfig
from splitjax.models.steps import make_nnx_step, make_step
from splitjax.models.transformer import LinenTransformer, NnxTransformer, TransformerConfig
from splitjax.models.vgg import LinenVGG, NnxVGG, VGGConfig

__all__ = [
    "LIBRARIES",
    "NAMES",
    "LinenMLP",
    "LinenResNet",
    "LinenTransformer",
    "LinenVGG",
    "MLPConfig",
    "ModelError",
    "ModelSpec",
    "NnxMLP",
    "NnxResNet",
    "NnxTransformer",
    "NnxVGG",
    "ResNetConfig",
    "TransformerConfig",
    "VGGConfig",
    "build",
    "make_nnx_step",
    "make_step",
]
