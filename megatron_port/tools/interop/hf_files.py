"""A Hugging Face folder's safetensors as a reader of our parameters: any box, from the rows that it needs.

Files are memory maps, so what a process holds is what it asked for: each rank of a run reads its own slices, and an
import passes through a parameter a slab at a time. No pickle: a folder with ``.bin`` files only is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.families import family_named
from megatron_port.tools.interop.hf_config import CONFIG, family_of, model_from_hf, read_hf_config
from megatron_port.tools.interop.hf_names import MODULE_HEAD, Mapped, Run, hf_mapping, hf_tensors, overlaps

# Which safetensors a Hugging Face folder has, and which tensor is in which of them.

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_MAX_INDEX = 1 << 28
_SLAB_BYTES = 1 << 26
SAMPLED_ROWS = 64
"""Rows of two tensors that are compared to tell whether they are copies, where not all are."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Shards:
    """The open safetensors of a folder.

    Raises:
        CheckpointError: there are none, a tensor has no dtype of ours, or two files have it with other values.
        DamagedCheckpoint: a file is cut, or the index contradicts the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._open: dict[str, Any] = {}
        self.places: dict[str, StoredTensor] = self._scan()

    def slice_of(self, name: str) -> Any:
        """Return safetensors' view of a tensor."""
        return self._file(self.places[name].file).get_slice(name)

    def same(self, name: str, other: str, *, sampled: bool = False) -> bool:
        """Whether two tensors have the same shape and values, read a slab at a time. ``sampled``: the values of
        :data:`SAMPLED_ROWS` rows, first and last among them."""
        one, two = self.places[name], self.places[other]
        a, b = self.slice_of(name), self.slice_of(other)
        if one.shape != two.shape or not sampled or one.shape[0] <= SAMPLED_ROWS:
            return one.shape == two.shape and _equal(a, b, one.shape)
        last = one.shape[0] - 1
        rows = (last * i // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS))
        return all(_same_values(a[row : row + 1], b[row : row + 1]) for row in rows)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.path / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing; {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpoint(f"{path}: not a whole safetensors file: {error}") from None
        return self._open[name]

    def _scan(self) -> dict[str, StoredTensor]:
        """Every tensor of every file. A file with all of them comes before an index, as in transformers; an index that
        is used must agree with its files."""
        listed: dict[str, str] = {}
        if (self.path / SINGLE).is_file():
            files = [SINGLE]
            if (self.path / INDEX).is_file():
                self.notes.append(
                    f"{self.path}: {SINGLE} is read, as in transformers; {INDEX} beside it and what it names are not"
                )
        elif (self.path / INDEX).is_file():
            listed = self._index()
            files = sorted(set(listed.values()))
        else:
            raise self._no_weights()
        found: dict[str, StoredTensor] = {}
        for file in files:
            handle = self._file(file)
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                place = self._place(handle, name, file)
                if name in found:
                    self._one_of(name, found[name], place)
                    place = found[name] if listed.get(name) == found[name].file else place
                found[name] = place
        for name, file in listed.items():
            if name not in found or found[name].file != file:
                raise DamagedCheckpoint(f"{self.path / INDEX}: {name} should be in {file}, and is not")
        return found

    def _place(self, handle: Any, name: str, file: str) -> StoredTensor:
        data = handle.get_slice(name)
        code = data.get_dtype()
        if code not in DTYPES:
            raise CheckpointError(
                f"{self.path / file}: {name} is {code}; only {', '.join(DTYPES)} can be imported: convert it"
            )
        return StoredTensor(file, DTYPES[code], tuple(data.get_shape()))

    def _one_of(self, name: str, one: StoredTensor, two: StoredTensor) -> None:
        """Raise CheckpointError where two files have a tensor, and not the same one."""
        a, b = (self._file(place.file).get_slice(name) for place in (one, two))
        if one.shape != two.shape or one.dtype != two.dtype or not _equal(a, b, one.shape):
            raise CheckpointError(
                f"{self.path}: {name} is in {one.file} and, with other values, in {two.file}; remove one of them"
            )

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        try:
            if path.stat().st_size > _MAX_INDEX:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes; an index has at most {_MAX_INDEX}")
            table = json.loads(path.read_bytes())["weight_map"]
            if not isinstance(table, dict) or not table:
                raise ValueError("weight_map is not a table of names")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path}: damaged: {type(error).__name__}: {error}") from None
        for file in table.values():
            if not isinstance(file, str) or not _FILE.fullmatch(file):
                raise CheckpointError(f"{path}: file name {file!r:.120} is not allowed; expected NAME.safetensors")
        return table

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(p.name for p in self.path.glob("*.bin"))
        if not pickles:
            return CheckpointError(f"{self.path}: no {SINGLE} and no {INDEX} in it; are the weights there?")
        return CheckpointError(
            f"{self.path}: its weights are pickles ({pickles[0]}), which can run any program when they are read. If "
            "you trust whoever made them, convert them once: python -c \"from transformers import "
            f"AutoModelForCausalLM as M; M.from_pretrained('{self.path}')"
            f".save_pretrained('{self.path}-safetensors')\""
        )


def _equal(one: Any, two: Any, shape: tuple[int, ...]) -> bool:
    """Whether two views of tensors of this shape have the same values."""
    if not shape or 0 in shape:
        return _same_values(one[...], two[...])
    width = 8
    for size in shape[1:]:
        width *= size
    step = max(1, _SLAB_BYTES // width)
    rows = (slice(row, row + step) for row in range(0, shape[0], step))
    return all(_same_values(one[box], two[box]) for box in rows)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.double(), b.double())


ADAPTERS = "adapter_config.json"
AHEAD = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the field that counts modules of multi-token prediction."""


def is_hf(source: Path) -> bool:
    """Whether this folder looks like one of transformers' models."""
    if not (source / CONFIG).is_file():
        return False
    try:
        return "model_type" in read_hf_config(source)
    except CheckpointError:
        return False


class HFFolder:
    """An open folder. ``read`` is an engine's ``StateReader``; it serves weights only, in the dtype that they have.

    ``sampled``: of tensors that should be copies of one another (a tied head, what modules of multi-token prediction
    share) rows are compared here, and the others where they are read: each of a run's ranks then reads its slices
    of both, not all of both.

    Raises:
        CheckpointError: an architecture or option that our model does not have, files that are missing or no
            safetensors, tensors that are missing, unknown or of another shape.
    """

    def __init__(self, path: Path | str, *, sampled: bool = False) -> None:
        self.path, self._sampled = Path(path), sampled
        self._copies: dict[str, list[str]] = {}
        """Names of tensors → those of what rows show to be their copies; in the files."""
        self._divided: dict[str, tuple[list[str], int]] = {}
        """Tensors whose rows are otherwise divided among their neighbours in the files → these, and the first row."""
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory; give a folder with config.json and safetensors")
        self.config = read_hf_config(self.path)
        where = str(self.path / CONFIG)
        family = family_of(self.config, where)
        self.family, self._names = family.name, family.names
        self._shards = Shards(self.path)
        self._places, self._twin = self._shards.places, ""
        # Files of the bare model (no language-model class around it) lack the prefix.
        bare = not any(name.startswith(self._names.prefix) for name in self._places)
        self._cut = len(self._names.prefix) if bare else 0
        self.notes: list[str] = self._shards.notes
        """Sentences on what is left out of the folder, or read otherwise than it is written."""
        self.model: ModelConfig = model_from_hf(self._without_ahead(), where, self.notes)
        self._untie_head()
        if (self.path / ADAPTERS).is_file():
            self.notes.append(
                f"{self.path}: {ADAPTERS} is beside the model, and its adapters are not read; where PEFT is installed, "
                "transformers adds them. fine_tuning.adapters continues them"
            )
        self.mapping: dict[str, Mapped] = hf_mapping(self.model, self.family)
        self._check()

    def _without_ahead(self) -> dict[str, Any]:
        """Return the configuration, without the modules of multi-token prediction where no file has any of them: they
        are transformers' default, but it makes none."""
        asked = [name for name in AHEAD if self._names.ahead and self.config.get(name)]
        layers = self.config.get("num_hidden_layers")
        if not asked or not isinstance(layers, int):
            return self.config
        first = self.key(self._names.prefix + self._names.layer.format(layers))
        if any(name.startswith(first) for name in self._places):
            return self.config
        self.notes.append(
            f"{self.path / CONFIG}: {asked[0]} is {self.config[asked[0]]!r:.20}, and the files have no such modules; "
            "it is read as 0"
        )
        return self.config | dict.fromkeys(asked, 0)

    def _untie_head(self) -> None:
        """Untie the model where the files have a head that is not the token table, as transformers 5 does. A head
        without a token table is both."""
        table = f"{self._names.prefix}{self._names.outside['embedding.word']}.weight"
        if not self.model.tie_embeddings or not self.tensor_known(MODULE_HEAD):
            return
        head = self.key(MODULE_HEAD)
        if not self.tensor_known(table):
            self._twin = table
            said = f"the files have no {self.key(table)}; {head} is read for it, since config.json ties the two"
            self.notes.append(f"{self.path}: {said}")
        elif not self._is_copy(head, self.key(table)):
            self.model = replace(self.model, tie_embeddings=False)
            self.notes.append(
                f"{self.path}: config.json ties the head to the token table, but the files have another {head}; it is "
                "kept and the model is untied, as in transformers 5 (4 would drop it)"
            )

    def _is_copy(self, copy: str, name: str) -> bool:
        """Whether two tensors, by their names in the files, are the same; by rows, of which :meth:`_rows` compares the
        others, where the folder is ``sampled``."""
        same = self._shards.same(copy, name, sampled=self._sampled)
        if same and self._sampled:
            self._copies.setdefault(name, []).append(copy)
        return same

    def names(self) -> list[str]:
        """Canonical names of all parameters."""
        return list(self.mapping)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one of our parameters: the widest of its tensors in the folder; of a buffer, float32."""
        if self.mapping[name].kind == BUFFER:
            return torch.float32
        found = [self._place(run.tensor).dtype for run in self.mapping[name].runs]
        out = found[0]
        for other in found[1:]:
            out = torch.promote_types(out, other)
        return out

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The box ``offset + shape`` of a parameter of ours, on the CPU; a tensor of its own, whatever ``out`` is.

        Raises:
            CheckpointError: no such parameter or kind, or the box leaves it.
            DamagedCheckpoint: a file cannot be read.
        """
        mapped = self.mapping.get(name)
        if mapped is None or kind != mapped.kind:
            raise CheckpointError(f"{self.path}: no {kind} of {name}: a Hugging Face folder has its model's weights")
        if len(offset) != len(mapped.shape) or any(
            min(o, n) < 0 or o + n > whole for o, n, whole in zip(offset, shape, mapped.shape)
        ):
            raise CheckpointError(
                f"{self.path}: {name} has shape {mapped.shape}; the model asks for {tuple(shape)} at {tuple(offset)}: "
                "it is another model"
            )
        columns = None if mapped.columns is None else (offset[-1], shape[-1])
        parts = [
            self._rows(mapped, run, start, count, columns)
            for first, length in _row_ranges(mapped, tuple(offset), tuple(shape))
            for run, start, count in overlaps(mapped.runs, first, length)
        ]
        dtype = self.dtype(name)
        if not parts:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.cat([p.to(dtype) for p in parts]).view(tuple(shape))

    def tensor_known(self, name: str) -> bool:
        """Whether there is a tensor of this name (with the prefix)."""
        return self.key(name) in self._places

    def tensor(self, name: str) -> torch.Tensor | None:
        """A whole tensor by its name there (with the prefix); None: there is none."""
        if not self.tensor_known(name):
            return None
        found = self._slice(name)[...]
        assert isinstance(found, torch.Tensor)
        return found

    def _rows(
        self, mapped: Mapped, run: Run, start: int, count: int, columns: tuple[int, int] | None
    ) -> torch.Tensor:
        """Return ``count`` rows from ``start`` (of ours, within ``run``), some columns of them."""
        box: tuple[slice | int, ...] = (run.rows(start, count),)
        if columns is not None:
            some = slice(columns[0], columns[0] + columns[1])
            box = (some, *box) if mapped.transposed else (*box, some)
        if mapped.dimensions:
            parts = iter(box)
            box = tuple(0 if size == 1 else next(parts) for size in mapped.dimensions)
        if run.expert is not None:
            box = (run.expert, *box)
        key = self.key(run.tensor)
        try:
            if run.tensor in self._divided:
                return self._among(run.tensor, box)
            found: torch.Tensor = self._shards.slice_of(key)[box]
            for copy in self._copies.get(key, ()):
                if not _same_values(found, self._shards.slice_of(copy)[box]):
                    raise CheckpointError(
                        f"{self.path}: config.json makes {copy} a copy of {key}, and so are {SAMPLED_ROWS} rows that "
                        f"were compared, but not rows {start} to {start + count - 1}; set tie_word_embeddings to false "
                        "there if it is a head of its own, or import the folder (checkpoint import compares all rows)"
                    )
            return found.t() if mapped.transposed else found
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{self.path / self._place(run.tensor).file}: {run.tensor}: {error}") from None

    def _among(self, name: str, box: tuple[Any, ...]) -> torch.Tensor:
        """Return a box of a tensor whose rows are otherwise divided in the files."""
        keys, at = self._divided[name]
        first, last, found = at + box[0].start, at + box[0].stop, []
        for key in keys:
            count = self._places[key].shape[0]
            start, stop = max(first, 0), min(last, count)
            if start < stop:
                found.append(self._shards.slice_of(key)[(slice(start, stop), *box[1:])])
            first, last = first - count, last - count
        return torch.cat(found)

    def _divide(self, name: str, wanted: dict[str, tuple[int, ...]]) -> bool:
        """Whether neighbours that transformers joins have the rows of a tensor: it writes parts of equal sizes."""
        for parts in self._names.joined.values():
            part = next((part for part in parts if part in name), None)
            if part is None:
                continue
            names = [name.replace(part, other) for other in parts]
            keys = [self.key(other) for other in names]
            there = [self._places[key].shape for key in keys if key in self._places]
            sizes = [wanted[other] for other in names]
            same = len({shape[1:] for shape in (*there, *sizes)}) == 1 and len(there) == len(sizes)
            if same and sum(s[0] for s in there) == sum(s[0] for s in sizes):
                self._divided[name] = keys, sum(wanted[other][0] for other in names[: parts.index(part)])
                return True
        return False

    def _place(self, name: str) -> StoredTensor:
        return self._places[self.key(name)]

    def key(self, name: str) -> str:
        """Return the name in the files; the head may have either of its two."""
        head = self._names.head
        if name in (head, MODULE_HEAD, self._twin):
            return head if head in self._places else MODULE_HEAD
        key = name[self._cut :] if name.startswith(self._names.prefix) else name
        others = (key.replace(part, other) for part, other in self._names.also.items())
        return key if key in self._places else next((other for other in others if other in self._places), key)

    def _slice(self, name: str) -> Any:
        return self._shards.slice_of(self.key(name))

    def _ahead_hint(self, key: str) -> str:
        """Return what to set where a tensor of a module of multi-token prediction is missing."""
        layers = (self.model.num_layers + i for i in range(self.model.mtp_layers))
        ahead = (self.key(self._names.prefix + self._names.layer.format(layer)) for layer in layers)
        return f" ({AHEAD[0]}; 0 imports the model without such modules)" if key.startswith(tuple(ahead)) else ""

    def _check(self) -> None:
        """Every tensor of the model is there with its shape, and no other but known buffers."""
        tensors = list(hf_tensors(self.model, self.family))
        wanted, copies = {t.name: t.shape for t in tensors}, {t.name: t.copy_of for t in tensors if t.copy_of}
        for name, shape in wanted.items():
            key = self.key(name)
            place = self._places.get(key)
            if place is None:
                if name in copies:
                    continue
                raise CheckpointError(
                    f"{self.path}: {key} {shape} is not in its files; config.json asks for it{self._ahead_hint(key)}"
                )
            if place.shape != shape and not self._divide(name, wanted):
                raise CheckpointError(
                    f"{self.path / place.file}: {key} has shape {place.shape}; config.json makes it {shape}"
                )
            if name in copies and not self._is_copy(key, self.key(copies[name])):
                raise CheckpointError(
                    f"{self.path / place.file}: {key} is not {copies[name]}, which the modules of multi-token "
                    "prediction share with the model"
                )
        known = {self.key(n) for n in wanted}
        if self.model.tie_embeddings:
            known.add(self.key(MODULE_HEAD))  # a copy of the embedding that transformers ignores as well
        left = sorted(n for n in self._places if n.startswith(self._names.left_out))
        if left:
            self.notes.append(
                f"{self.path}: {len(left)} tensors from {left[0]} on are left out, which transformers does not load"
            )
        for name in sorted(self._places.keys() - known - {*left}):
            if not name.endswith(self._names.buffers):
                raise CheckpointError(
                    f"{self.path / self._places[name].file}: {name} {self._places[name].shape} is no parameter of a "
                    f"{self.family} as config.json describes it"
                )


def open_sampled(path: Path | str) -> HFFolder:
    """Open a folder for one of a run's ranks, or for its description alone."""
    return HFFolder(path, sampled=True)


def _row_ranges(mapped: Mapped, offset: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (first, count) of flattened rows that a slice covers, in order."""
    lead = len(shape) if mapped.columns is None else len(shape) - 1
    ranges = [(offset[lead - 1], shape[lead - 1])]
    inner = mapped.shape[lead - 1]
    for d in range(lead - 2, -1, -1):
        ranges = [((offset[d] + i) * inner + first, count) for i in range(shape[d]) for first, count in ranges]
        inner *= mapped.shape[d]
    return ranges


# transformers' model of a folder, one module's weights in memory at a time: the other side of the check of an export.
#
# From version 5 on its modules hold all experts of a layer in one tensor, which files do not.

def norm_weights(model: ModelConfig) -> set[str]:
    """Canonical names of what the check does not scale."""
    return {p.name for p in model_spec(model).parameters() if p.init != "normal" and p.name.endswith(".weight")}


def loaded_by(transformers: Any, folder: Path) -> nn.Module:
    """Return transformers' model of a folder in fp32, loaded by itself: none of our reading is in it. Code of the
    folder's is not run, and pickles are not read."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True, attn_implementation="eager",
        experts_implementation="eager", dtype=torch.float32,
    )
    return model.eval()


def scaled_logits(network: nn.Module, source: HFFolder, tokens: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Logits [batch, seq, vocab] of transformers' model, whose weights but norms are multiplied by ``scale`` first."""
    norms = _norms(source)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if norms.isdisjoint(_file_names(source, name)):
                parameter.mul_(scale)
        out: torch.Tensor = network(tokens, use_cache=False).logits
    return out


def their_logits(transformers: Any, folder: Path, tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Logits [batch, seq, vocab] of transformers' model of a folder in fp32, one module's weights at a time."""
    source = HFFolder(folder)
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    network.eval()
    _real_buffers(network, config, source)
    norms = _norms(source)
    names: dict[int, str] = {}
    parameters = list(network.named_parameters(remove_duplicate=False))
    for name, parameter in (*((n, p) for n, p in parameters if source.tensor_known(n)), *parameters):
        names.setdefault(id(parameter), name)
    for path, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        # The module around a convolution reads its weight.
        runs = network.get_submodule(path.rpartition(".")[0]) if isinstance(module, nn.Conv1d) else module
        if own:
            _stream(module, runs, {key: names[id(p)] for key, p in own.items()}, source, norms, scale)
    with torch.no_grad():
        out: torch.Tensor = network(tokens, use_cache=False).logits
    return out


def _real_buffers(network: nn.Module, config: Any, source: HFFolder) -> None:
    """Compute the buffers that no file has (rotary frequencies, causal masks) by their module's constructor; read the
    others."""
    for path, parent in list(network.named_modules()):
        for name, child in list(parent.named_children()):
            if not any(b.is_meta for b in child.buffers(recurse=False)):
                continue
            if hasattr(child, "scalar_embed_scale"):  # Gemma's embedding, made of sizes
                child.register_buffer("embed_scale", torch.tensor(child.scalar_embed_scale), persistent=False)
                continue
            if hasattr(child, "mup_vector"):  # Falcon-H1's factors, made of sizes
                factors = import_module(type(child).__module__).compute_mup_vector(config)
                child.register_buffer("mup_vector", factors, persistent=False)
                continue
            made = type(child)(config)
            if next(made.parameters(), None) is None:
                setattr(parent, name, made)
            else:  # its parameters stay, which may be tied to another module's
                for key, buffer in made.named_buffers(recurse=False):
                    saved = source.tensor(_file_names(source, f"{path}.{name}.{key}")[0])
                    child.register_buffer(key, buffer if saved is None else saved.float(), persistent=False)


def _stream(
    module: nn.Module, runs: nn.Module, own: dict[str, str], source: HFFolder, norms: set[str], scale: float
) -> None:
    """Give ``module`` its parameters before ``runs`` does so and take them away afterwards."""
    empty = dict(module.named_parameters(recurse=False))

    def load(*_: Any) -> None:
        for key, name in own.items():
            tensor = _loaded(source, name, empty[key].shape[0])
            if tensor is None:
                raise CheckpointError(f"{source.path}: transformers' model has a parameter {name}, the export has none")
            value = tensor.float() * (scale if norms.isdisjoint(_file_names(source, name)) else 1.0)
            module.register_parameter(key, nn.Parameter(value, requires_grad=False))

    def drop(*_: Any) -> None:
        for key in own:
            module.register_parameter(key, empty[key])

    runs.register_forward_pre_hook(load)
    runs.register_forward_hook(drop)


def _norms(source: HFFolder) -> set[str]:
    """Return the names in the files of what the check does not scale."""
    return {
        source.key(run.tensor) for name in norm_weights(source.model) for run in source.mapping[name].runs
    }


def _file_names(source: HFFolder, name: str) -> tuple[str, ...]:
    """Return the names in the files of a parameter of transformers', several where it joins their rows; those of
    experts left as they are."""
    names = family_named(source.family).names
    for there, loaded in names.loaded.items():
        name = name if source.tensor_known(name) else name.replace(loaded, there)
    for joined, parts in names.joined.items():
        if joined in name and not source.tensor_known(name):
            return tuple(source.key(name.replace(joined, part)) for part in parts)
    return (source.key(name),)


def _loaded(source: HFFolder, name: str, experts: int) -> torch.Tensor | None:
    """Return a parameter of transformers': as it is in the files, joined from several of theirs or, of all experts, put
    together from each one's."""
    found = [tensor for one in _file_names(source, name) if (tensor := source.tensor(one)) is not None]
    if found:
        return torch.cat(found) if len(found) > 1 else found[0]
    (name,) = _file_names(source, name)
    block, _, part = name.rpartition(".")
    inside = family_named(source.family).names.inside
    each = inside.get({"down_proj": "mlp.experts.down"}.get(part, "mlp.experts.up"))
    if each is None or not block.endswith(".experts"):
        return None
    parts = (each,) if isinstance(each, str) else each
    before = block.removesuffix(parts[0].partition(".{}")[0])
    of_one = ([source.tensor(f"{before}{p.format(e)}.weight") for p in parts] for e in range(experts))
    return torch.stack([torch.cat([t for t in tensors if t is not None]) for tensors in of_one])
