"""A residual network for images, from 8 x 8 digits to photographs.

Returns logits; knows no loss. BatchNorm makes gradients depend on the split into micro-batches: the
only part that is not exact under accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.models.activations import ActivationName, activation


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig:
    """Shape of a residual network. The defaults suit small images; `resnet50` large ones.

    Args:
        in_channels: channels of an image.
        num_classes: number of classes.
        stem: `small`: one 3 x 3 convolution; `large`: 7 x 7 of stride 2, then max-pooling, as in
            He et al. 2015.
        block: `basic`: two 3 x 3 convolutions; `bottleneck`: 1 x 1, 3 x 3 (which carries the
            stride), 1 x 1 to four times the width.
        widths: channels of each stage; every stage after the first halves height and width.
        blocks_per_stage: number of blocks of each stage; a single number applies to all.
        activation: after each norm.
        dropout: probability, before the last layer.
    """

    in_channels: int
    num_classes: int
    stem: Literal["small", "large"] = "small"
    block: Literal["basic", "bottleneck"] = "basic"
    widths: tuple[int, ...] = (32, 64, 128)
    blocks_per_stage: int | tuple[int, ...] = 2
    activation: ActivationName = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.in_channels, self.num_classes, *self.widths, *self.depths)
        if (
            len(self.widths) != len(self.depths)
            or not self.widths
            or min(sizes) < 1
            or not 0.0 <= self.dropout < 1.0
        ):
            raise ModelError(
                f"a residual network cannot have in_channels={self.in_channels}, "
                f"num_classes={self.num_classes}, widths={list(self.widths)}, "
                f"blocks_per_stage={list(self.depths)}, dropout={self.dropout}",
                where="ResNetConfig",
                rule="as many widths as numbers of blocks, all positive; dropout in [0, 1)",
                remedy="change the named sizes",
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks of each stage."""
        if isinstance(self.blocks_per_stage, int):
            return (self.blocks_per_stage,) * len(self.widths)
        return self.blocks_per_stage

    @classmethod
    def resnet50(cls, *, in_channels: int = 3, num_classes: int = 1000) -> ResNetConfig:
        """ResNet-50 with the stride in the 3 x 3 convolution ("v1.5")."""
        return cls(
            in_channels=in_channels,
            num_classes=num_classes,
            stem="large",
            block="bottleneck",
            widths=(64, 128, 256, 512),
            blocks_per_stage=(3, 4, 6, 3),
        )


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    # No bias: the following norm has one.
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    """`activation(x + convolutions(x))`; a 1 x 1 convolution adapts x where shapes differ."""

    def __init__(self, config: ResNetConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        if config.block == "bottleneck":
            plan = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        else:
            plan = [(width, 3, stride), (width, 3, 1)]
        self.out_channels = plan[-1][0]
        layers: list[nn.Module] = []
        channels = in_channels
        for out_channels, size, step in plan:
            layers += [
                _convolution(channels, out_channels, size, step),
                nn.BatchNorm2d(out_channels),
                activation(config.activation),
            ]
            channels = out_channels
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != self.out_channels:
            self.shortcut = nn.Sequential(
                _convolution(in_channels, self.out_channels, 1, stride),
                nn.BatchNorm2d(self.out_channels),
            )
        self.activation = activation(config.activation)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The last norm of the branch."""
        norm = self.branch[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        return norm

    def forward(self, pictures: Tensor) -> Tensor:
        """[B, in_channels, H, W] to [B, out_channels, H / stride, W / stride]."""
        out: Tensor = self.activation(self.shortcut(pictures) + self.branch(pictures))
        return out


class ResNet(nn.Module):
    """Images to logits.

    Initialized by He's rule (fan-out), the last norm of each branch at 0, so that every block
    starts as the identity (Goyal et al. 2017), the last layer normal with standard deviation 0.01.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.widths[0]
        large = config.stem == "large"
        self.stem = nn.Sequential(
            _convolution(config.in_channels, channels, 7 if large else 3, 2 if large else 1),
            nn.BatchNorm2d(channels),
            activation(config.activation),
            nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity(),
        )
        blocks = []
        for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            for place in range(depth):
                stride = 2 if stage > 0 and place == 0 else 1
                blocks.append(ResidualBlock(config, channels, width, stride))
                channels = blocks[-1].out_channels
        self.blocks = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(channels, config.num_classes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all weights from torch's global random stream."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.last_norm.weight)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits of a batch of images.

        Args:
            pixel_values: [B, in_channels, H, W].

        Returns:
            [B, num_classes].

        Raises:
            ModelError: the shape is wrong.
        """
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.config.in_channels:
            raise ModelError(
                f"pixel_values have shape {list(pixel_values.shape)}",
                where="ResNet.forward",
                rule=f"[batch, {self.config.in_channels}, height, width]",
                remedy="add the missing dim, or correct in_channels",
            )
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(self.dropout(hidden.mean(dim=(2, 3))))
        return out
