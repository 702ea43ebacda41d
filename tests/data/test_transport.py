"""What crosses the border of a process arrives as it was, or an error says why not."""

from __future__ import annotations

import os
import threading
import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.data.transport import Channel, TransportClosed, TransportTimeout

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    tokens: torch.Tensor
    name: str


def through(value: Any) -> Any:
    left, right = Channel.pair()
    # A large message is more than a socket holds: it must be read while it is written.
    sender = threading.Thread(target=left.send, args=(value, 20.0))
    sender.start()
    received = right.receive(20.0)
    sender.join()
    left.close()
    right.close()
    return received


TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(200_000).reshape(400, 500),
    torch.zeros(0, 4),
    torch.tensor(3.5, dtype=torch.float64),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.arange(12.0)[::3],
    torch.tensor([True, False]),
    torch.randn(100, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj(),
    torch.zeros(3, requires_grad=True),
    # Some versions of torch warn when they rebuild any sparse tensor.
    pytest.param(
        torch.eye(3).to_sparse(), marks=pytest.mark.filterwarnings("ignore:Sparse invariant")
    ),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    received = through(tensor)
    assert received.dtype == tensor.dtype and received.shape == tensor.shape
    assert received.requires_grad == tensor.requires_grad
    assert torch.equal(received.to_dense(), tensor.to_dense())


def test_containers_arrive_as_they_were() -> None:
    shared = torch.arange(5)
    value = {
        "pair": Pair(torch.ones(2), np.arange(10_000)),
        "record": Record(torch.zeros(70_000), "name"),
        "list": [shared, shared, "text", None, 3],
        "odd": np.zeros(3, dtype=np.uint8),
        "double": torch.ones(3, dtype=torch.float64),
    }
    received = through(value)
    assert isinstance(received["pair"], Pair)
    assert torch.equal(received["pair"].left, torch.ones(2))
    assert np.array_equal(received["pair"].right, np.arange(10_000))
    assert received["record"].name == "name" and received["record"].tokens.shape == (70_000,)
    assert received["list"][0] is received["list"][1]
    assert received["list"][2:] == ["text", None, 3]
    assert torch.equal(received["double"], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_arrives_can_be_written_to(size: int) -> None:
    tensor, array = through((torch.zeros(size), np.zeros(size)))
    tensor += 1
    array += 1
    assert tensor.sum() == size and array.sum() == size


def test_large_values_do_not_travel_through_the_socket() -> None:
    left, right = Channel.pair()
    began = time.monotonic()
    # Nobody reads: 40 MB fit only because they lie beside the socket.
    left.send(torch.zeros(10_000_000), 5.0)
    assert time.monotonic() - began < 5.0
    left.close()
    assert right.receive(5.0).shape == (10_000_000,)
    right.close()


def test_messages_keep_their_order_and_outlive_the_sender() -> None:
    left, right = Channel.pair()
    for number in range(10):
        left.send((number, torch.full((5_000,), number)))
    left.close()
    for number in range(10):
        label, tensor = right.receive(5.0)
        assert label == number and (tensor == number).all()
    with pytest.raises(TransportClosed):
        right.receive(5.0)
    right.close()


def test_waiting_has_an_end() -> None:
    left, right = Channel.pair()
    with pytest.raises(TransportTimeout):
        right.receive(0.05)
    with pytest.raises(TransportTimeout):
        # More text than a socket holds, and nobody reads.
        left.send("x" * 10_000_000, 0.05)
    left.close()
    right.close()


def test_a_message_that_stops_half_way_is_not_waited_for() -> None:
    whole: list[bytes] = []

    class Recording:
        def sendmsg(self, buffers: Any, ancillary: Any) -> int:
            whole.append(b"".join(bytes(buffer) for buffer in buffers))
            return len(whole[-1])

        def settimeout(self, seconds: Any) -> None: ...

    Channel(Recording()).send(list(range(100)))  # type: ignore[arg-type]
    for part in (4, 20, 40, len(whole[0]) - 1):
        left, right = Channel.pair()
        left.socket.sendall(whole[0][:part])
        with pytest.raises(TransportTimeout):
            right.receive(0.05)
        left.close()
        right.close()


def test_sending_to_nobody_says_so() -> None:
    left, right = Channel.pair()
    right.close()
    with pytest.raises(TransportClosed):
        left.send("hello")
    left.close()


def test_no_descriptor_is_left() -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    before = open_descriptors()
    for _ in range(20):
        value = through(torch.zeros(50_000))
    del value
    assert open_descriptors() == before
