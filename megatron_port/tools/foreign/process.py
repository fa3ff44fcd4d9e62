"""One process of a trainer, reference or rank: same weights in, two steps, a record out."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.placement import (
    by_content,
    by_shape,
    local,
    of_dtensor,
    of_megatron,
    stated,
    whole,
)
from megatron_port.tools.foreign.positions import Cell
from megatron_port.tools.foreign.record import STEPS, Output, Part, Record

WEIGHTS, ALIASES = "weights.safetensors", "aliases.json"
T = TypeVar("T")
MOST_OUTPUT = 1 << 20
"""Elements of a module's output; larger ones are not compared."""


def batch_of(adapter: Adapter, step: int, seed: int = 0) -> Batch:
    """Return the batch of a step. Where labels can be left out, sample i has fewer of them than sample i + 1."""
    generator = torch.Generator().manual_seed(1000 + step + 7919 * seed)
    ids = torch.randint(0, adapter.vocabulary, (adapter.samples, adapter.sequence + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if adapter.ignored is not None:
        for sample in range(adapter.samples):
            left_out = (adapter.samples - 1 - sample) * adapter.sequence // (2 * adapter.samples)
            labels[sample, :left_out] = adapter.ignored
    return Batch(tokens, labels)


def disturbed(name: str, weight: Tensor, seed: int) -> Tensor:
    """Return a weight with noise by its name, so that no norm is 1 and no bias 0, which would hide what is wrong."""
    if not weight.is_floating_point():
        if weight.is_complex():
            raise ConfigError(f"{name} is complex, which is not compared; leave it out of Adapter.parameters")
        return weight.detach().cpu()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    std = 0.1 if weight.dim() < 2 else 0.5 / math.sqrt(max(1, weight.shape[-1]))
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return (weight.detach().cpu().double() + std * noise).to(weight.dtype)


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of what a module returns: of tuples, dictionaries and dataclasses within one another."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        yield from (tensor for value in result.values() for tensor in tensors_in(value))
    elif isinstance(result, (tuple, list)):
        yield from (tensor for value in result for tensor in tensors_in(value))
    elif is_dataclass(result) and not isinstance(result, type):
        yield from (tensor for one in fields(result) for tensor in tensors_in(getattr(result, one.name)))


def places(adapter: Adapter, world: World) -> dict[str, tuple[int, int]]:
    """Return (index, size) of this rank on each axis.

    Raises:
        ConfigError: the axes do not make as many ranks.
    """
    axes = adapter.axes(world)
    if math.prod(axes.values()) != world.size:
        named = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        raise ConfigError(f"axes {named} are not {world.size} ranks; see {type(adapter).__name__}.axes")
    found, rest = {}, world.rank
    for axis, size in reversed(list(axes.items())):
        found[axis] = (rest % size, size)
        rest //= size
    return dict(reversed(list(found.items())))


class Process:
    """A trainer with known weights. ``folder``: of the case; the reference writes the weights there. ``seed``: of noise
    in the weights, and of the batches."""

    def __init__(self, adapter: Adapter, world: World, folder: Path, *, seed: int, reference: bool = False) -> None:
        self.adapter, self.world, self._seed = adapter, world, seed
        torch.manual_seed(1234)
        adapter.start(world)
        self.state = adapter.build(world)
        self.aliases: dict[str, str] = {}
        """Other names of tied parameters, which ranks may find first."""
        parameters = dict(adapter.parameters(self.state))
        if reference:
            (folder / ALIASES).write_text(json.dumps(self._tied(parameters)))
            weights = {name: disturbed(name, local(p), seed) for name, p in parameters.items()}
            for name, weight in weights.items():
                if weight.shape != parameters[name].shape:
                    raise ConfigError(f"{name} is divided on one process, {list(weight.shape)}")
            save_file(weights, str(folder / WEIGHTS))
        self.whole = load_file(str(folder / WEIGHTS))
        self.aliases = json.loads((folder / ALIASES).read_text())
        parameters = self._named(parameters)
        if unknown := sorted(parameters.keys() - self.whole.keys()):
            known = ", ".join(list(self.whole)[:3])
            raise ConfigError(
                f"rank {world.rank} has {len(unknown)} parameters that one process does not have: "
                f"{', '.join(unknown[:3])}; it has {known}, ...: map names in {type(adapter).__name__}.name"
            )
        self.maps = self._load(parameters)

    def _tied(self, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the names that parameters have beside those of ``parameters``: of modules that share one."""
        known, found = {id(value): name for name, value in parameters.items()}, {}
        try:
            modules = list(self.adapter.modules(self.state))
        except TypeError:
            return {}
        for prefix, module in modules:
            for own, value in module.named_parameters(remove_duplicate=False):
                name = self.adapter.name(f"{prefix}{own}")
                if name not in parameters and id(value) in known:
                    found[name] = known[id(value)]
        return found

    def _named(self, values: Mapping[str, T]) -> dict[str, T]:
        """Return what is given by name, tied parameters by the name that one process finds first.

        Raises:
            ConfigError: this rank has two of a tied one.
        """
        found: dict[str, T] = {}
        for name, value in values.items():
            first = self.aliases.get(name, name)
            if first in found and found[first] is not value:
                raise ConfigError(f"rank {self.world.rank} has {name} apart from {first}, which are one parameter on "
                                  "one process: the ranks do not tie them")
            found[first] = value
        return found

    def _load(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Load the weights; return the map of each parameter."""
        adapter, state = self.adapter, self.state
        if adapter.load(state, self.whole):
            adapter.loaded(state)
            return {name: by_content(name, local(p), self.whole[name])
                    for name, p in self._named(adapter.parameters(state)).items()}
        given = {self.aliases.get(name, name): at for name, at in adapter.placements(state, self.world).items()}
        axes, maps = places(adapter, self.world), {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                full = self.whole[name]
                found = None
                if name in given:
                    found = stated(given[name], full.shape)
                elif hasattr(parameter, "placements"):
                    found = of_dtensor(parameter, full.shape)
                elif "tp" in axes:
                    found = of_megatron(parameter, full.shape, axes["tp"])
                part = local(parameter)
                if found is None:
                    found = by_shape(name, part, full.shape, axes)
                if found.shape != part.shape:
                    raise ConfigError(
                        f"{name}: rank {self.world.rank} has {list(part.shape)}, but its placement makes "
                        f"{list(found.shape)} of {list(full.shape)}; see {type(adapter).__name__}.placements"
                    )
                part.copy_(full.flatten()[found.clamp(min=0)].masked_fill(found < 0, 0))
                maps[name] = found
        adapter.loaded(state)
        return maps

    def _part(self, name: str, value: Tensor) -> Part:
        """Return a gradient or weight with its map."""
        full = self.whole[name].shape
        if hasattr(value, "placements"):
            from torch.distributed.tensor import Replicate

            settled = [Replicate() if p.is_partial() else p for p in value.placements]
            whole_sum: Any = value
            value = whole_sum.redistribute(placements=settled)
            return Part(local(value).detach().clone(), of_dtensor(value, full))
        value = local(value).detach()
        index = self.maps.get(name)
        if index is not None and index.shape == value.shape:
            return Part(value.clone(), index)
        if value.shape == full:
            return Part(value.clone(), whole(full))
        if index is None or index.numel() != value.numel():
            raise ConfigError(
                f"{name}: rank {self.world.rank} gives {list(value.shape)}, which is neither the whole "
                f"{list(full)} nor its part {'' if index is None else list(index.shape)}; see "
                f"{type(self.adapter).__name__}.gradients"
            )
        return Part(value.clone().reshape(index.shape), index)

    def parts(self, values: Mapping[str, Tensor | None]) -> dict[str, Part]:
        """Return those that are there, with their maps."""
        return {name: self._part(name, value) for name, value in self._named(values).items() if value is not None}

    def run(self, *, outputs: bool = True) -> Record:
        """Take the steps."""
        adapter, state = self.adapter, self.state
        record = Record(self.world.rank)
        record.weights.append(self.parts(adapter.weights(state)))
        for step in range(STEPS):
            batch = batch_of(adapter, step, self._seed)
            with self._listening(record, outputs and step == 0):
                loss = adapter.step(state, batch, self.world)
            record.losses.append(None if loss is None else float(loss))
            gradients = adapter.gradients(state)
            record.gradients.append(self.parts(gradients))
            record.absent.append(sorted(n for n, value in self._named(gradients).items() if value is None))
            norm = adapter.norm(state)
            record.norms.append(None if norm is None else float(norm))
            adapter.update(state)
            record.weights.append(self.parts(adapter.weights(state)))
        return record

    @contextmanager
    def _listening(self, record: Record, wanted: bool) -> Iterator[None]:
        """Keep what modules return in the forward pass; a forward pass within a backward one is that of recompute."""
        handles: list[Any] = []
        calls: dict[str, int] = {}

        def heard(name: str, result: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            call, calls[name] = calls.get(name, 0), calls.get(name, 0) + 1
            for part, tensor in enumerate(tensors_in(result)):
                if tensor.is_floating_point() and 0 < tensor.numel() <= MOST_OUTPUT:
                    if any(p.is_partial() for p in getattr(tensor, "placements", ())):
                        continue  # a sum that is not made yet
                    record.outputs.append(Output(name, call, part, local(tensor).detach().clone()))

        if wanted and self.adapter.modules_seen:
            for prefix, module in self.adapter.modules(self.state):
                for name, inner in module.named_modules():
                    known = self.adapter.name(f"{prefix}{name}.").removesuffix(".")
                    if not known:
                        continue  # of a stage, the whole is another one
                    handles.append(inner.register_forward_hook(
                        lambda module, arguments, result, known=known: heard(known, result)
                    ))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def by_sample(self) -> tuple[Record, list[int]]:
        """Run each sample of the first step alone; return losses and gradients as if each were a step, and how many
        labels each has."""
        record, counts = Record(self.world.rank), []
        batch = batch_of(self.adapter, 0, self._seed)
        for sample in range(len(batch)):
            one = batch[sample : sample + 1]
            self._alone(one, record)
            counts.append(int((one.labels != self.adapter.ignored).sum()) if self.adapter.ignored is not None
                          else one.labels.numel())
        return record, counts

    def by_cell(self, blocks: int) -> tuple[Record, list[Cell]]:
        """Run each block of positions of each sample of the first step with its labels alone; return losses and
        gradients, and the cells. ``blocks``: of a sample."""
        record, cells = Record(self.world.rank), []
        batch, ignored = batch_of(self.adapter, 0, self._seed), self.adapter.ignored
        assert ignored is not None
        length = batch.labels.shape[1] // blocks
        for sample, block in itertools.product(range(len(batch)), range(blocks)):
            at = slice(block * length, (block + 1) * length)
            labels = torch.full_like(batch.labels[sample : sample + 1], ignored)
            labels[:, at] = batch.labels[sample, at]
            if count := int((labels != ignored).sum()):
                self._alone(Batch(batch.tokens[sample : sample + 1], labels), record)
                cells.append(Cell(sample, block, count))
        return record, cells

    def _alone(self, batch: Batch, record: Record) -> None:
        """Take a step with a batch; add its loss and gradients to a record."""
        loss = self.adapter.step(self.state, batch, self.world)
        record.losses.append(float(loss))
        record.gradients.append(self.parts(self.adapter.gradients(self.state)))
