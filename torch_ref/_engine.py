"""The one file that uses private hooks of torch and keeps process-wide tables.

Two hooks, which torch uses itself: the id of the running backward
(`torch._C._current_graph_task_id`) and the callback at its end
(`Variable._execution_engine.queue_callback`). Two tables, both weak, so nothing here
outlives the model or the backward that it describes.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

T = TypeVar("T")

_NO_TASK = -1
_order = itertools.count()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_task_frames: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(module: torch.nn.Module) -> None:
    """Adds a module to the list that a reduction over ranks walks."""
    _modules[next(_order)] = module


def registered_modules() -> list[Any]:
    """Living FP8 modules in the order of their creation."""
    # `valuerefs` copies the table at once; another thread may be building a model.
    modules = (ref() for ref in _modules.valuerefs())
    return [module for module in modules if module is not None]


def in_backward() -> bool:
    """Whether the autograd engine is running a backward in this thread."""
    return torch._C._current_graph_task_id() != _NO_TASK  # noqa: SLF001


def backward_frame(make: Callable[[], T], commit: Callable[[T], None]) -> T:
    """The frame of the running backward, made and queued for commit at first use.

    The engine's callback holds the only strong reference: a backward that fails drops
    its frame, and nothing of it is committed.
    """
    task = torch._C._current_graph_task_id()  # noqa: SLF001
    # A backward over several GPUs runs in one thread for each.
    with _lock:
        frame = _task_frames.get(task)
        if frame is not None:
            return frame
        frame = _task_frames[task] = make()
    Variable._execution_engine.queue_callback(lambda: commit(frame))  # type: ignore[attr-defined]  # noqa: SLF001
    return frame
