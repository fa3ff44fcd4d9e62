"""What `make release` makes: equal bytes from equal sources, and a wheel that works where no checkout is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
extends = "models/gpt-tiny"
name = "away"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 257
seq_length = 32
[batch]
global_batch_size = 4
[data]
synthetic = true
[training]
steps = 4
"""


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / ("" if name == "setup" else "scripts") / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_contents_make_equal_archives(tmp_path: Path) -> None:
    release = script("release")
    made = []
    for name, moment in (("a", 1_000_000_000), ("b", 1_700_000_000)):
        work = tmp_path / name / "x-1"
        work.mkdir(parents=True)
        for file in ("b.py", "a.py") if name == "a" else ("a.py", "b.py"):
            (work / file).write_text(file)
            os.utime(work / file, (moment, moment))
        (work / "run.sh").write_text("x")
        (work / "run.sh").chmod(0o755 if name == "a" else 0o775)
        archive = tmp_path / name / "x-1.tar.gz"
        with tarfile.open(archive, "w:gz") as stream:
            stream.add(work, "x-1")
        release.plain_archive(archive, 1_600_000_000)
        made.append(archive)
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as stream:
        assert [m.name for m in stream] == ["x-1", "x-1/a.py", "x-1/b.py", "x-1/run.sh"]
        assert {m.mtime for m in stream} == {1_600_000_000}
        assert stream.extractfile("x-1/a.py").read() == b"a.py"  # type: ignore[union-attr]


def test_differences_are_named(tmp_path: Path) -> None:
    release = script("release")
    for name, text in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "x.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("same", (2020, 1, 1, 0, 0, 0)), "same")
            archive.writestr(zipfile.ZipInfo("other", (2020, 1, 1, 0, 0, 0)), text)
    (tmp_path / "a" / "alone").touch()
    found = release.differences(tmp_path / "a", tmp_path / "b")
    assert found[0] == "alone is in one of the two only" and found[1].startswith("x.whl: ") and found[2:] == ["  other"]
    assert release.differences(tmp_path / "a", tmp_path / "a") == []
    wrong = release.check_wheel(tmp_path / "a" / "x.whl")
    assert "not tagged for every Python" in wrong[-1] and len(wrong) == len(release.LIBRARIES) + 1


def test_the_version_is_gits_or_what_an_sdist_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = script("setup")

    def git(*words: str) -> None:
        author = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    monkeypatch.setattr(setup, "HERE", tmp_path)
    assert setup.version() == "0.1.0.dev0"
    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert setup.version().startswith("0.1.0.dev1+g")
    git("tag", "v1.2.3")
    assert setup.version() == "1.2.3"
    git("commit", "--allow-empty", "-m", "two")
    assert setup.version().startswith("1.2.4.dev1+g")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: megatron_port\nVersion: 9.8.7\n")
    assert setup.version() == "9.8.7"


def test_the_bill_of_materials_names_what_the_wheel_requires(tmp_path: Path) -> None:
    sbom = script("release_sbom")
    (tmp_path / "x.whl").write_bytes(b"wheel")
    assert sbom.write_sbom(ROOT, tmp_path, "1.0", 1_600_000_000) > 15
    (path,) = tmp_path.glob("*.cdx.json")
    first, body = path.read_text(), json.loads(path.read_text())
    names = {c["name"]: c for c in body["components"]}
    assert body["bomFormat"] == "CycloneDX" and {"torch", "numpy", "rich", "tqdm"} <= set(names)
    assert not {"pytest", "ruff", "moto"} & set(names)  # of the tests
    assert names["rich"]["version"] == sbom.pinned(ROOT)["rich"] and names["rich"]["purl"].startswith("pkg:pypi/rich@")
    refs = {c["bom-ref"] for c in body["components"]} | {body["metadata"]["component"]["bom-ref"]}
    assert all({d["ref"], *d["dependsOn"]} <= refs for d in body["dependencies"])
    sbom.write_sbom(ROOT, tmp_path, "1.0", 1_600_000_000)
    assert path.read_text() == first


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles, perhaps beside others
def test_the_wheel_works_in_a_bare_environment(tmp_path: Path) -> None:
    """Built as it is released, installed elsewhere without a checkout, a compiler or a network: it trains, plans and
    exports, and loads its own kernels. torch and the other requirements are those of this environment."""
    out = tmp_path / "dist"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "release.py"), "--once", "--out", str(out)], check=True,
                   cwd=tmp_path, timeout=1700)
    (wheel,) = out.glob("*.whl")
    sums = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=out, capture_output=True, text=True, check=True)
    assert sums.stdout.count(": OK") == 3
    away = tmp_path / "elsewhere"
    venv.create(away / "env", with_pip=True)
    site = next((away / "env" / "lib").glob("python3*")) / "site-packages"
    here = next(p for p in map(Path, sys.path) if (p / "torch" / "version.py").is_file())
    (site / "requirements-of-the-tests.pth").write_text(f"{here}\n")
    python = str(away / "env" / "bin" / "python")
    began = time.monotonic()
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, installed in {time.monotonic() - began:.1f} s")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": str(away / "env" / "bin")}

    def port(*words: str) -> str:
        done = subprocess.run([str(away / "env" / "bin" / "megatron-port"), *words], cwd=away, env=environment,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (away / "run.toml").write_text(RUN)
    code = "import megatron_port; print(megatron_port.__file__, megatron_port.__version__)"
    where, version = subprocess.run([python, "-c", code], cwd=away, env=environment, capture_output=True, text=True,
                                    check=True).stdout.split()
    assert Path(where).is_relative_to(away) and version == wheel.name.split("-")[1]
    said = port("train", "run.toml", "--nproc", "2", "--set", "layout.tensor_parallel_size=2")
    assert "finished: step 4 of 4" in said and "own" in said  # its kernels, not only torch's
    assert json.loads(port("plan", "runs/frontier-22b", "--json"))
    port("checkpoint", "export", "runs/away", "hf", "--to", "hf", "--no-tokenizer")
    assert (away / "hf" / "model.safetensors").is_file()
    assert json.loads(port("runs", "list", "--json"))[0]["status"] == "finished"
