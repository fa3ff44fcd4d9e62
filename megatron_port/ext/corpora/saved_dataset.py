"""Folders that ``datasets.save_to_disk`` wrote: which of their files hold the rows of a split."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.errors import DataError
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import LARGEST, parse_json

NOT_ROWS = "describes a saved data set"


def parts_of(path: Path, split: str, *, required: bool = False) -> dict[str, str]:
    """Return why each entry of such a folder is not read, by name; empty: it is no such folder.

    ``required``: one that cannot be understood is an error, also where it may be a folder of another kind.

    Raises:
        DataError: no such split, or a saved selection of rows.
    """
    if not required and not (path / "dataset_dict.json").is_file() and not (path / "dataset_info.json").is_file():
        return {}
    try:
        names = [entry.name for entry in path.iterdir()]
        if (path / "dataset_dict.json").is_file():
            splits = parse_json(read_regular(path / "dataset_dict.json", LARGEST))["splits"]
            if split not in splits:
                raise DataError(f"{path}: no split {split!r}; it has {', '.join(map(str, splits))}: --split")
            return {name: NOT_ROWS if name == "dataset_dict.json" else "of another split (--split)"
                    for name in names if name != split}
        if not (path / "state.json").is_file():
            return {"dataset_info.json": NOT_ROWS}
        files = set(arrow_files(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable `datasets` folder ({type(error).__name__}: {error})") from error
    return {name: NOT_ROWS if name.endswith(".json") else "no part of the saved data set"
            for name in names if name not in files}


def arrow_files(path: Path) -> list[str]:
    """Return the names of the files of a saved data set, in its order.

    Raises:
        DataError: a name of another folder, a file that is missing, or rows that are selected apart.
        OSError, ValueError, KeyError, TypeError: it cannot be read.
    """
    state = parse_json(read_regular(path / "state.json", LARGEST))
    names = [str(entry["filename"]) for entry in state["_data_files"]]
    if state.get("_indices_files"):
        raise DataError(f"{path}: it keeps a selection of rows apart; save it again with datasets' save_to_disk "
                        "after flatten_indices()")
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise DataError(f"{path}/state.json names {name!r}, which is not a file in this folder")
    return names
