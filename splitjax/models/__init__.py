"""Models to train, each in Flax Linen and in Flax NNX: VGG, ResNet, MobileNet, EfficientNet, ConvNeXt, an MLP and a
small decoder Transformer; and those whose gradients are mostly tables: an LSTM with a sampled softmax, DeepFM and DLRM.

They are ordinary Flax models, and `make_step` makes ordinary training steps of them: nothing here knows about
parallelism. The demo, the benchmarks and the tests decorate these steps as a user would decorate their own.
"""

from splitjax.models._common import ModelError
from splitjax.models.convnext import ConvNeXtConfig, LinenConvNeXt, NnxConvNeXt
from splitjax.models.deepfm import DeepFMConfig, LinenDeepFM, NnxDeepFM
from splitjax.models.dlrm import DLRMConfig, LinenDLRM, NnxDLRM
from splitjax.models.efficientnet import EfficientNetConfig, LinenEfficientNet, NnxEfficientNet
from splitjax.models.lstm import LinenLSTM, LSTMConfig, NnxLSTM
from splitjax.models.mlp import LinenMLP, MLPConfig, NnxMLP
from splitjax.models.mobilenet import LinenMobileNet, MobileNetConfig, NnxMobileNet
from splitjax.models.objectives import area_under_curve
from splitjax.models.own import OwnStep
from splitjax.models.registry import LIBRARIES, NAMES, build, make_model, reads, register_model
from splitjax.models.resnet import LinenResNet, NnxResNet, ResNetConfig
from splitjax.models.sampled_softmax import log_uniform, sampled_cross_entropy, tabled
from splitjax.models.spec import ModelSpec, from_linen, from_nnx
from splitjax.models.steps import make_nnx_step, make_step
from splitjax.models.transformer import LinenTransformer, NnxTransformer, TransformerConfig
from splitjax.models.vgg import LinenVGG, NnxVGG, VGGConfig

__all__ = [
    "LIBRARIES",
    "NAMES",
    "ConvNeXtConfig",
    "DLRMConfig",
    "DeepFMConfig",
    "EfficientNetConfig",
    "LSTMConfig",
    "LinenConvNeXt",
    "LinenDLRM",
    "LinenDeepFM",
    "LinenEfficientNet",
    "LinenLSTM",
    "LinenMLP",
    "LinenMobileNet",
    "LinenResNet",
    "LinenTransformer",
    "LinenVGG",
    "MLPConfig",
    "MobileNetConfig",
    "ModelError",
    "ModelSpec",
    "NnxConvNeXt",
    "NnxDLRM",
    "NnxDeepFM",
    "NnxEfficientNet",
    "NnxLSTM",
    "NnxMLP",
    "NnxMobileNet",
    "NnxResNet",
    "NnxTransformer",
    "NnxVGG",
    "OwnStep",
    "ResNetConfig",
    "TransformerConfig",
    "VGGConfig",
    "area_under_curve",
    "build",
    "from_linen",
    "from_nnx",
    "log_uniform",
    "make_model",
    "make_nnx_step",
    "make_step",
    "reads",
    "register_model",
    "sampled_cross_entropy",
    "tabled",
]
