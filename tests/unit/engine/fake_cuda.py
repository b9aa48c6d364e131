"""A fake of the parts of torch.cuda that the engine uses for graphs and streams, on a CPU: a
capture records calls, and a replay repeats them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda.decoder import CudaDecoder


class FakeStream:
    """Counts how often it was waited for."""

    def __init__(self, *_device: object) -> None:
        self.waits = 0

    def wait_stream(self, _other: object) -> None: ...

    def synchronize(self) -> None:
        self.waits += 1


class FakeGraph:
    """Repeats the calls made during its capture."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class FakeCuda:
    """``current`` is the current stream; ``graphs`` were captured on ``streams``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = FakeStream()
        self.made: list[FakeStream] = []
        self.graphs: list[FakeGraph] = []
        self.streams: list[object] = []
        self.whole_device_waits = 0
        self._capturing: FakeGraph | None = None
        patched = {
            "Stream": self._stream, "stream": lambda _stream: contextlib.nullcontext(),
            "current_stream": lambda _device=None: self.current, "CUDAGraph": FakeGraph,
            "graph": self._graph, "graph_pool_handle": lambda: (0, 1),
            "synchronize": self._synchronize,
        }  # fmt: skip
        for name, value in patched.items():
            monkeypatch.setattr(torch.cuda, name, value)
        body = CudaDecoder._body

        def noted(decoder: CudaDecoder, *given: Any) -> None:
            body(decoder, *given)
            if self._capturing is not None:
                self._capturing.calls.append(lambda: body(decoder, *given))

        monkeypatch.setattr(CudaDecoder, "_body", noted)

    def _stream(self, *device: object) -> FakeStream:
        self.made.append(FakeStream(*device))
        return self.made[-1]

    def _synchronize(self, _device: object = None) -> None:
        assert driver.WHOLE_DEVICE.locked(), "another thread's capture would break"
        self.whole_device_waits += 1

    @contextlib.contextmanager
    def _graph(self, graph: FakeGraph, *, pool: object, stream: object,
               capture_error_mode: str) -> Iterator[None]:  # fmt: skip
        assert driver.WHOLE_DEVICE.locked(), "another thread may wait for the device"
        assert capture_error_mode == "thread_local" and pool == (0, 1)
        self._capturing = graph
        yield
        self._capturing = None
        self.graphs.append(graph)
        self.streams.append(stream)
