"""Models ready to train: a decoder, a residual network and a perceptron."""

from surefoot.models.gpt import GPT, GPTConfig
from surefoot.models.mlp import MLP, MLPConfig
from surefoot.models.resnet import ResNet, ResNetConfig

__all__ = ["GPT", "MLP", "GPTConfig", "MLPConfig", "ResNet", "ResNetConfig"]
