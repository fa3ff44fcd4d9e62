"""Blends of hundreds of corpora within the limits on open files of a login shell."""

from __future__ import annotations

import dataclasses
import os
import resource

import numpy as np
import pytest

from megatron_port.core.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig
from megatron_port.core.data.loader import corpus_datasets, open_corpora
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.writer import IndexedWriter

CORPORA = 300


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    for i in range(CORPORA):
        if i < 3:
            with IndexedWriter(folder / f"{i:03}", vocab_size=300) as writer:
                for k in range(4):
                    writer.add_document(np.arange(40) + i + k)
            continue
        for suffix in ("bin", "idx"):
            (folder / f"{i:03}.{suffix}").symlink_to(f"{i % 3:03}.{suffix}")
    data = DataConfig(train=tuple(str(folder / f"{i:03}") for i in range(CORPORA)), split=(1.0, 0.0, 0.0))
    return dataclasses.replace(
        RunConfig(), data=data, output_dir=str(folder), batch=BatchConfig(micro_batch_size=1, global_batch_size=4),
        model=dataclasses.replace(ModelConfig(), seq_length=16, vocab_size=300))


def limited(soft, hard, work):
    """What ``work`` gives in a process with these limits, a text."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.closerange(3, write)  # what other tests of this process left open does not count
        os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            said = work()
        except DataError as error:
            said = f"DataError: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def opened(run):
    corpora = open_corpora(run)
    train = corpus_datasets(run, corpora, 2000)[0]
    assert train is not None
    samples = [train.draw(run.seed, k).tokens for k in range(0, 2000, 7)]
    own = len(os.listdir("/dev/fd"))
    return f"{sum(int(s.sum()) for s in samples)} {own}"


@pytest.mark.parametrize("order", ["stateless", "megatron"])
def test_hundreds_of_corpora(run, order):
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, order=order))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip(f"the hard limit on open files is {hard}")
    plenty = limited(8192, hard, lambda: opened(run)).split()
    assert limited(256, hard, lambda: opened(run)).split() == plenty
    if order == "stateless":
        assert int(plenty[1]) < 2 * CORPORA + 64  # two files of each
        assert limited(1024, 1024, lambda: opened(run)).split() == plenty
    said = limited(256, 256, lambda: opened(run))
    assert said.startswith("DataError: ") and "this process may have 256 files open" in said and "ulimit -n" in said
