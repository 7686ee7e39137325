"""Tests of the documentation of trust: files that may run code when loaded, and safe files."""

import contextlib
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from functional_optim import adamw, export_step

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "old_format" / "saved" / "adamw"
PAGE = (ROOT / "docs" / "trust.md").read_text()


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/trust.md)" in (ROOT / "README.md").read_text()
    for name in (
        "export_step",
        "mapped_state",
        "ZeroRedundancyOptimizer.save",
        "ChecksumReader",
        "CXX",
    ):
        assert f"`{name}`" in PAGE
    for word in ("checkpoint", "plan", "FUNCTIONAL_OPTIM_CACHE"):
        assert word in PAGE


class Planted:
    """Object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import builtins; builtins.planted = True",)


@pytest.mark.filterwarnings("ignore")  # torch warns about a fallback
def test_an_exported_package_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user must therefore trust a package, as the page says."""
    import builtins

    monkeypatch.setattr(builtins, "planted", False, raising=False)
    whole, changed = tmp_path / "step.pt2", tmp_path / "changed.pt2"
    export_step(adamw(), {"w": torch.ones(3)}, whole)
    torch.save(Planted(), tmp_path / "planted.pt", pickle_module=pickle)
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(changed, "w") as made:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("sample_inputs/model.pt"):
                content = (tmp_path / "planted.pt").read_bytes()
            made.writestr(name, content)
    with contextlib.suppress(Exception):  # the planted object is not a valid input
        torch.export.load(changed)
    assert builtins.planted


READING = """
import json, sys, tempfile, warnings
warnings.filterwarnings("ignore", "torch.distributed is disabled")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pathlib import Path
from functional_optim import adamw
from functional_optim.storage import mapped_state
from sharding import ShardPlan, ZeroRedundancyOptimizer, plan
from sharding.sources import read_source
from sharding.storage import ChecksumReader, ChecksumWriter
from sharding.storage.folder import read_folder
from sharding.zero.old_checkpoint import read_state_dict

folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
w = torch.nn.Parameter(torch.ones(2))
zero = ZeroRedundancyOptimizer([("w", w)], torch.optim.AdamW, lr=0.1)
w.grad = torch.ones(2)
zero.step()
state = {"w": w.detach(), "optim": zero}
dcp.save(state, storage_writer=ChecksumWriter(folder / "checkpoint"))
text = plan({"w": w}, 2).to_json()
(folder / "shapes.json").write_text("[[2]]")
header = json.dumps({"w": {"dtype": "F32", "shape": [2]}}).encode()
data = len(header).to_bytes(8, "little") + header
(folder / "model.safetensors").write_bytes(data)

def everything():
    zero.load_state_dict(zero.state_dict())
    # Between ranks, torch sends pickles: see the page. Here there is one process.
    dcp.load(state, storage_reader=ChecksumReader(folder / "checkpoint"), no_dist=True)
    read_folder(folder / "checkpoint")
    read_state_dict(sys.argv[2])
    ShardPlan.from_json(text)
    read_source(str(folder / "shapes.json"))
    read_source(str(folder / "model.safetensors"))
    mapped_state(adamw(), {"w": torch.ones(2)}, folder / "state")

everything()  # what it imports is imported now
seen, watching = [], True
RUNS = ("exec", "compile", "import", "pickle.find_class", "marshal.loads", "ctypes.dlopen",
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda event, _: seen.append(event) if watching and event in RUNS else None)
everything()
watching = False
print(json.dumps(seen))
dist.destroy_process_group()
"""


def test_what_need_not_be_trusted_runs_nothing(tmp_path: Path) -> None:
    """Loading checkpoints, plans, shapes, headers and mapped state runs no code."""
    command = [sys.executable, "-c", READING, str(tmp_path), str(OLD)]
    done = subprocess.run(command, check=True, timeout=900, stdout=subprocess.PIPE, text=True)
    assert json.loads(done.stdout) == []
