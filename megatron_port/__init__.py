"""Train GPT-like models with tensor, pipeline and data parallelism, from one laptop to thousands of GPUs.

``megatron_port.api`` shows the names below at work. Importing this package imports nothing but ``former_names``: each
name is looked up when it is first used, so that a configuration can be checked on a login node in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megatron_port.former_names import install

try:
    from megatron_port._version import __version__  # which an installation has
except ImportError:  # a checkout: the commit says more, and ``git`` is not asked for it here
    __version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from megatron_port.api import build_engine as build_engine
    from megatron_port.api import build_loaders as build_loaders
    from megatron_port.api import build_model as build_model
    from megatron_port.api import load_config as load_config
    from megatron_port.api import open_session as open_session
    from megatron_port.api import run_training as run_training
    from megatron_port.core.checkpoint.reader import open_checkpoint as open_checkpoint
    from megatron_port.core.config.schema import RunConfig as RunConfig
    from megatron_port.core.data.batch import MicroBatch as MicroBatch
    from megatron_port.core.data.indexed import IndexedDataset as IndexedDataset
    from megatron_port.core.engine.api import Engine as Engine
    from megatron_port.core.errors import PortError as PortError
    from megatron_port.core.optim.schedules import learning_rate as learning_rate
    from megatron_port.core.train.hooks import Session as Session
    from megatron_port.ext.corpora.prepare import prepare as prepare
    from megatron_port.ext.corpora.tokenizer import get_tokenizer as get_tokenizer
    from megatron_port.run.trainer import Trainer as Trainer
    from megatron_port.tools.posttrain.learner import Learner as Learner

_WHERE = {
    "build_engine": "megatron_port.api",
    "build_loaders": "megatron_port.api",
    "build_model": "megatron_port.api",
    "load_config": "megatron_port.api",
    "open_session": "megatron_port.api",
    "run_training": "megatron_port.api",
    "open_checkpoint": "megatron_port.core.checkpoint.reader",
    "RunConfig": "megatron_port.core.config.schema",
    "IndexedDataset": "megatron_port.core.data.indexed",
    "prepare": "megatron_port.ext.corpora.prepare",
    "get_tokenizer": "megatron_port.ext.corpora.tokenizer",
    "Engine": "megatron_port.core.engine.api",
    "MicroBatch": "megatron_port.core.data.batch",
    "PortError": "megatron_port.core.errors",
    "learning_rate": "megatron_port.core.optim.schedules",
    "Learner": "megatron_port.tools.posttrain.learner",
    "Trainer": "megatron_port.run.trainer",
    "Session": "megatron_port.run.session",
}

__all__ = ["Engine", "IndexedDataset", "Learner", "MicroBatch", "PortError", "RunConfig", "Session", "Trainer",
           "__version__", "build_engine", "build_loaders", "build_model", "get_tokenizer", "learning_rate",
           "load_config", "open_checkpoint", "open_session", "prepare", "run_training"]

install()


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'megatron_port' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
