"""Tests that every notebook runs, shows the results in its text, and is stored without output."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbformat import NotebookNode

import functional_optim

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOURCE = Path(functional_optim.__file__).parents[1]
EXPECTED = {
    "average_over_a_slow_link",
    "compose_an_optimizer",
    "migrate_from_torch_optim",
    "muon_with_adamw",
    "overlap_timeline",
    "plan_shards",
    "property_test_an_update",
    "register_your_own",
    "sweep_and_meta_gradients",
}
NUMBER = r"(\d+\.\d+)"


def read(name: str) -> NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ------------------------------------------------------------------------------------ as stored


def test_the_notebooks_are_these() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_kept_short_without_output_and_of_no_machine(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 12
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}, "a version of Python is output too"
    assert all(cell.metadata == {} for cell in notebook.cells)
    ids = [cell.id for cell in notebook.cells]
    assert ids == [str(index) for index in range(len(ids))], "nbstripout would change the ids"
    for cell in notebook.cells:
        assert not re.search(r"/(home|root|tmp|usr|work|Users)\b", cell.source), cell.source


# ------------------------------------------------------------------------------------ executed


class Executed:
    """Output of an executed notebook: text, errors and pictures."""

    def __init__(self, notebook: NotebookNode) -> None:
        outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
        streams = [one for one in outputs if one.output_type == "stream"]
        self.text = "".join(one.text for one in streams if one.name == "stdout")
        self.stderr = "".join(one.text for one in streams if one.name == "stderr")
        self.pictures = sum("image/png" in one.get("data", {}) for one in outputs)

    def numbers(self, pattern: str) -> list[float]:
        """Return the numbers in the output that match the groups of a pattern."""
        found = re.search(pattern, self.text)
        assert found, f"{pattern!r} is not in:\n{self.text}"
        return [float(number) for number in found.groups()]


class Runner:
    """Runner of notebooks in one kernel, with the interpreter and packages of the tests.

    A new kernel needs seconds to import torch. Each notebook starts without the names of earlier
    notebooks, and in an empty working directory. A notebook that fails ends the kernel.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manager: AsyncKernelManager | None = None
        write_kernel_spec(folder / "kernels" / "python3")

    def __call__(self, name: str) -> Executed:
        notebook = read(name)
        here = self._folder / name
        here.mkdir()
        first = nbformat.v4.new_code_cell(f"import os\nos.chdir({str(here)!r})\n%reset -f")
        notebook.cells.insert(0, first)
        if self._manager is None:
            self._manager = self._new_manager()
        client = NotebookClient(notebook, km=self._manager, timeout=None)  # each test has a timeout
        try:  # a cell that raises causes CellExecutionError
            client.execute(env=self._environment(), cleanup_kc=False)
        except BaseException:
            self.close()
            raise
        finally:
            if client.kc is not None:
                client.kc.stop_channels()
        return Executed(notebook)

    def close(self) -> None:
        if self._manager is not None:
            run_sync(self._manager.shutdown_kernel)(now=True)
            self._manager = None

    def interpreter(self) -> str:
        manager = self._new_manager()
        assert manager.kernel_spec is not None
        return str(manager.kernel_spec.argv[0])

    def _new_manager(self) -> AsyncKernelManager:
        specs = KernelSpecManager(
            kernel_dirs=[str(self._folder / "kernels")], ensure_native_kernel=False
        )
        # Sockets in the folder open no port, and the path is short enough for a socket.
        return AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=specs,
            transport="ipc",
            connection_file=str(self._folder / "kernel.json"),
        )

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
        own = {"IPYTHONDIR": "ipython", "MPLCONFIGDIR": "matplotlib", "JUPYTER_RUNTIME_DIR": "run"}
        return {
            **kept,
            **{key: str(self._folder / name) for key, name in own.items()},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SOURCE),
            "PYTHONWARNINGS": "error::DeprecationWarning:__main__",
        }


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="nb") as folder:
        runner = Runner(Path(folder))
        yield runner
        runner.close()


def test_a_notebook_begins_without_the_names_of_an_earlier_one(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ["leftover = 1", "print('leftover' in globals())"]
    notebooks = {
        name: nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        for name, cell in zip(("earlier", "later"), cells, strict=True)
    }
    monkeypatch.setattr(f"{__name__}.read", notebooks.__getitem__)
    run("earlier")
    assert run("later").text == "False\n"


def test_compose_an_optimizer(run: Runner) -> None:
    shown = run("compose_an_optimizer")
    assert shown.stderr == ""
    assert shown.pictures == 1
    first, ours, torchs = shown.numbers(
        rf"first loss {NUMBER}, then {NUMBER} with the chain and {NUMBER} with AdamW"
    )
    assert ours < 0.6 * first
    assert abs(ours - torchs) < 0.25
    assert "belief: lr must be a finite number >= 0, got -0.1" in shown.text
    assert "belief(lr=warmup(50, then=linear(0.006, to=0.0, steps=450)," in shown.text
    assert "4.bias has made 500 steps" in shown.text
    assert "2.weight has weight_decay 0.01\n2.bias has weight_decay 0.0\n" in shown.text
    last, averaged = shown.numbers(rf"new text: loss {NUMBER}, and {NUMBER} with averaged")
    assert max(last, averaged) < 0.6 * first


def test_register_your_own(run: Runner) -> None:
    shown = run("register_your_own")
    assert shown.stderr == ""
    assert "weight_decay(weight_decay=0.01), qhm(lr=0.1, momentum=0.999, nu=0.7)" in shown.text
    assert "the rule has the same bits as the class" in shown.text
    assert "2 groups, there and back: same bits" in shown.text
    first, last = shown.numbers(rf"loss {NUMBER}, then {NUMBER}; same bits as the class without")
    assert last < 0.5 * first


def test_property_test_an_update(run: Runner) -> None:
    shown = run("property_test_an_update")
    assert shown.stderr == ""
    reports = dict(
        re.findall(r"the law '(.+?)' is broken(.+?)(?=the law '|\Z)", shown.text, re.DOTALL)
    )
    assert list(reports) == ["same as the oracle", "pure", "any split by elements"]
    one_number = "param a: 0.0  (shape (), contiguous)\nstep 1:  a: 1.0\n"
    assert one_number in reports["same as the oracle"]
    assert "update wrote to one of its inputs" in reports["pure"]
    assert "declares that it is pointwise, but stepping" in reports["any split by elements"]
    for report in reports.values():
        smallest = report[report.index("smallest example:") :].split("\n\n")[0]
        assert "step 2" not in smallest, smallest
        assert "param b" not in smallest, smallest
    change = r"{'a': tensor\((\S+)\)}\n"
    right, late = shown.numbers(rf"\nadam: {change}late_adam: {change}")
    assert right == pytest.approx(-1e-3)
    assert late != pytest.approx(-1e-3, rel=0.1)
    assert "even obeys every law that needs no oracle" in shown.text


def test_plan_shards(run: Runner) -> None:
    shown = run("plan_shards")
    assert shown.stderr == ""
    assert shown.pictures == 3
    assert "greedy: 148 parameters, 124,439,808 elements, 8 ranks" in shown.text
    assert "'blocks.0.attention.weight' is per_matrix: its rule needs it whole" in shown.text
    (imbalance,) = shown.numbers(rf"imbalance {NUMBER}")
    assert imbalance < 1.01
    assert "owners of the embedding: [0, 1, 2, 3, 4, 5, 6, 7]" in shown.text
    stays, total = shown.numbers(r"(\d+) of (\d+) MiB stay on their rank")
    assert 0 < stays < total
    assert "world_size: 8 -> 6" in shown.text


def test_overlap_timeline(run: Runner) -> None:
    """Times depend on the machine, so the test only checks the parameters and the ranks."""
    shown = run("overlap_timeline")
    assert shown.stderr == ""
    assert shown.pictures == 1
    assert "both ways give the same parameters, bit for bit" in shown.text
    assert [int(rank) for rank in re.findall(r"rank (\d): \d of 6 steps", shown.text)] == [0, 1]


def test_sweep_and_meta_gradients(run: Runner) -> None:
    shown = run("sweep_and_meta_gradients")
    assert shown.stderr == ""
    assert shown.pictures == 2
    (best,) = shown.numbers(r"best of 41: lr = (\S+),")
    assert 1e-3 < best < 1.0, "the ends of the range are both bad"
    derivative, quotient = shown.numbers(r"derivative (\S+), difference quotient (\S+)")
    assert derivative == pytest.approx(quotient, rel=1e-3)
    first, learned = shown.numbers(rf"{NUMBER} at first, {NUMBER} learned")
    assert learned < 0.5 * first


def test_muon_with_adamw(run: Runner) -> None:
    shown = run("muon_with_adamw")
    assert shown.stderr == ""
    assert shown.pictures == 2
    assert "(with_shape(ndim=2) & ~matching('0.*', '6.*'))" in shown.text
    by_muon = re.findall(r"(\S+) .*bytes of state: step, momentum_buffer", shown.text)
    assert by_muon == ["2.weight", "4.weight"]
    alone, both = shown.numbers(rf"last losses: AdamW {NUMBER}, Muon and AdamW {NUMBER}")
    assert max(alone, both) < 2.5, "nats; a guess among 103 characters has 4.6"


def test_average_over_a_slow_link(run: Runner) -> None:
    shown = run("average_over_a_slow_link")
    assert shown.stderr == ""
    assert shown.pictures == 1
    losses = [float(loss) for loss in re.findall(rf"last loss {NUMBER}", shown.text)]
    assert len(losses) == 4
    assert max(losses) < 1.5 * min(losses)
    assert re.findall(r"per rank and step, 1/(\d+)", shown.text) == ["1", "8", "24", "93"]


def test_migrate_from_torch_optim(run: Runner) -> None:
    shown = run("migrate_from_torch_optim")
    assert shown.stderr == ""
    assert shown.pictures == 2
    assert "90 steps: all parameters are equal in every bit" in shown.text
    assert "equal in every bit to the run without a change" in shown.text
    assert "an lr_scheduler of torch computes with a number: keep one of the two" in shown.text
    assert "2 groups; step counts: {90}" in shown.text


def test_run_by_the_interpreter_of_the_tests(run: Runner) -> None:
    assert run.interpreter() == sys.executable
