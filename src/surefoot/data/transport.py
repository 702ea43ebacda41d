"""Messages between the loader and a worker over one socket, with large tensors in shared memory.

Each read has a time limit and depends only on data already in the socket, so a worker that stops at
any moment cannot stall the training. Starts no thread and no helper process, and leaves nothing
behind when either side dies: the shared memory is anonymous.

Pickle is used between these two processes only; nothing of it is stored.
"""

from __future__ import annotations

import array
import contextlib
import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

from surefoot.data.batch import is_aligned

_HEADER = struct.Struct("<QQI")
_ALIGNMENT_BYTES = 64
# Buffers below this total are sent in the message itself.
_INLINE_BYTES = 16 * 1024


class TransportTimeout(Exception):
    """The other side did not read or write in time."""


class TransportClosed(Exception):
    """The other side has closed or died."""


class _Pickler(pickle.Pickler):
    """Moves the memory of plain tensors, like that of NumPy arrays, out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            return NotImplemented
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        shape = tuple(value.shape)
        if value.numel() == 0:
            return _empty, (shape, value.dtype)
        # `reshape` before `view`: a 0-dim tensor cannot be viewed as bytes.
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _rebuild, (pickle.PickleBuffer(flat), shape, value.dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _rebuild(buffer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    # Shared memory is aligned as torch's own is; a buffer within the message may not be.
    return tensor if is_aligned(tensor) else tensor.clone()


def _shared_memory(size: int) -> int:
    """Descriptor of `size` bytes of anonymous memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("surefoot-batch", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="surefoot-")
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor


class Channel:
    """One end of a stream socket that carries Python values.

    Args:
        connection: a connected Unix stream socket, owned by the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    @property
    def socket(self) -> socket.socket:
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Closes this end; copies of it in other processes keep the connection alive."""
        self._socket.close()

    def hang_up(self) -> None:
        """Ends the connection for all processes, then closes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, value: Any, timeout_seconds: float | None = None) -> None:
        """Sends one value.

        Raises:
            TransportTimeout: the other side does not read.
            TransportClosed: the other side has closed or died.
        """
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        body = stream.getvalue()
        views = [buffer.raw() for buffer in buffers]
        offsets, total = [], 0
        for view in views:
            offsets.append((total, view.nbytes))
            total += -(-view.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        table = pickle.dumps(offsets, protocol=5)
        descriptor = -1
        inline = b""
        if 0 < total <= _INLINE_BYTES:
            inline = _packed(views, offsets, total)
        elif total:
            descriptor = _shared_memory(total)
        try:
            if descriptor >= 0:
                for view, (start, _) in zip(views, offsets, strict=True):
                    _write_at(descriptor, view, start)
            header = _HEADER.pack(len(body), len(inline), len(table))
            shared = struct.pack("<Q", total if descriptor >= 0 else 0)
            payload = header + shared + table + body + inline
            self._write(payload, descriptor, timeout_seconds)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """The next value; waits for it.

        Raises:
            TransportTimeout: nothing arrived in time.
            TransportClosed: the other side has closed or died.
        """
        self._socket.settimeout(timeout_seconds)
        head, descriptor = self._read_head(_HEADER.size + 8)
        try:
            body_size, inline_size, table_size = _HEADER.unpack_from(head)
            (shared_size,) = struct.unpack_from("<Q", head, _HEADER.size)
            offsets = pickle.loads(self._read(table_size))
            body = self._read(body_size)
            memory: Any = b""
            if inline_size:
                memory = self._read(inline_size)
            elif shared_size:
                memory = mmap.mmap(descriptor, shared_size)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        whole = memoryview(memory)
        views = [whole[start : start + size] for start, size in offsets]
        return pickle.loads(body, buffers=views)

    def _write(self, payload: bytes, descriptor: int, timeout_seconds: float | None) -> None:
        limit = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        view = memoryview(payload)
        # The descriptor is attached to the first byte, so that it arrives with the header.
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            if descriptor >= 0
            else []
        )
        try:
            while view:
                self._socket.settimeout(
                    None if limit is None else max(1e-3, limit - time.monotonic())
                )
                sent = self._socket.sendmsg([view], ancillary)
                ancillary = []
                view = view[sent:]
        except TimeoutError as error:
            raise TransportTimeout from error
        except OSError as error:
            raise TransportClosed from error

    def _read_head(self, size: int) -> tuple[bytes, int]:
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(descriptors.itemsize)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(size, room)
        except TimeoutError as error:
            raise TransportTimeout from error
        except OSError as error:
            raise TransportClosed from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: descriptors.itemsize])
        if not data:
            raise TransportClosed
        if len(data) < size:
            data += self._read(size - len(data))
        return data, descriptors[0] if descriptors else -1

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        try:
            while view:
                count = self._socket.recv_into(view)
                if count == 0:
                    raise TransportClosed
                view = view[count:]
        except TimeoutError as error:
            raise TransportTimeout from error
        except OSError as error:
            raise TransportClosed from error
        return data


def _packed(views: list[memoryview], offsets: list[tuple[int, int]], total: int) -> bytes:
    packed = bytearray(total)
    for view, (start, size) in zip(views, offsets, strict=True):
        packed[start : start + size] = view
    return bytes(packed)


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    # Writing is half as costly as filling a mapping of the same memory, which faults page by page.
    done = 0
    while done < view.nbytes:
        done += os.pwrite(descriptor, view[done:], start + done)
