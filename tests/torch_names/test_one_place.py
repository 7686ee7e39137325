"""Only functional_optim/_torch names private parts of torch."""

import ast
from pathlib import Path

from ..choices import case
from .finder import Found, known_names, nodes, own_names, private_names

SOURCE = Path(__file__).parents[2] / "src"
HOME = SOURCE / "functional_optim" / "_torch"

OTHERS = {
    str(file.relative_to(SOURCE.parent)): file.read_text("utf-8")
    for file in sorted(SOURCE.rglob("*.py"))
    if HOME not in file.parents
}
THERE = {file.name: file.read_text("utf-8") for file in sorted(HOME.glob("*.py"))}

PLANTED = {
    "import torch\ntorch._foreach_add_([], 1)\n": [(2, "torch._foreach_add_")],
    "import torch as t\n\n\ndef f():\n    return t._C._is_alias_of\n": [(5, "t._C._is_alias_of")],
    "from torch._subclasses import fake_tensor\n": [(1, "torch._subclasses.fake_tensor")],
    "def f():\n    from torch.x import y, _z\n": [(2, "torch.x._z")],
    "import torch._dynamo\n": [(1, "torch._dynamo")],
    "import torch.distributed as dist\ndist.distributed_c10d._world.pg_names\n": [
        (2, "dist.distributed_c10d._world")
    ],
    "from torch.distributed import autograd as a\na._current_context()._context_id()\n": [
        (2, "a._current_context()._context_id")
    ],
    "from torch import Tensor\nTensor._is_view(1)\n": [(2, "Tensor._is_view")],
    "def f(x):\n    return x.detach()._version\n": [(2, "x.detach()._version")],
    "def f(x):\n    return x[0]._unheard_of + x._own\n": [(2, "x[0]._unheard_of")],
    "class A:\n    def f(self):\n        self._own = self._of_a_base\n": [(3, "self._of_a_base")],
    "class A:\n    def f(self, x):\n        self._version = x._version\n": [(3, "x._version")],
    "getattr(x, '_known_in_torch', None)\n": [(1, "_known_in_torch")],
    "NAME = '_known_in_torch'\n": [(1, "_known_in_torch")],
    "import_module('torch._inductor.config')\n": [(1, "torch._inductor")],
    "exec(f'{x} = torch.ops.aten._foreach_add_({y})')\n": [(1, "torch.ops.aten._foreach_add_")],
    # Sources without a private name of torch.
    '"""A sentence on torch._inductor."""\nX = 1\n"""And torch._dynamo."""\n': [],
    "import sys, torch\nsys._current_frames(), torch.__version__, torch.foo\n": [],
    "def f(x):\n    return x._replace(a=x._fields), x._own, x.functional_optim._own\n": [],
    "from functional_optim._torch import foreach_add_\nforeach_add_([], 1)\n": [],
    "for _, _one in x:\n    _one._own(__name__, '_', '_scale')\n": [],
}


def test_no_other_file_names_a_private_part_of_torch() -> None:
    own, known = own_names(OTHERS.values()), known_names(THERE.values())
    found = [
        f"{file}:{one.line}: {one.name}"
        for file, source in OTHERS.items()
        for one in private_names(source, own, known)
    ]
    assert found == [], "name private parts of torch in src/functional_optim/_torch only"


def test_they_are_found() -> None:
    for source, expected in PLANTED.items():
        with case(source=source):
            found = private_names(source, {"_own", "_version"}, {"_known_in_torch"})
            assert found == [Found(*one) for one in expected]


def test_what_is_known_is_found_out_of_the_files() -> None:
    """The finder knows the names that ``_torch`` uses, and the names that a file defines itself."""
    known = known_names(THERE.values())
    assert {"_fused_adam_", "_C", "_functorch", "_version", "_join_config", "_dynamo"} <= known
    source = (
        "class A:\n    _a: int\n    def _f(self):\n        self._b = 1\n        self.x._c = 1\n"
    )
    assert own_names([source + "object.__setattr__(A(), '_d', 1)\n"]) == {"_a", "_b", "_d", "_f"}


def test_each_name_is_used() -> None:
    """Every name that a module of ``_torch`` defines is used by another file."""
    package = "functional_optim._torch."
    wanted, defined = set[str](), set[str]()
    for source in (*OTHERS.values(), *THERE.values()):
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                wanted.update(one.name for one in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "distributed":
                wanted.add(node.attr)
    for source in THERE.values():
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                defined.add(ast.unparse(target))
    assert {name for name in defined if not name.startswith("_")} - wanted == {"Given", "Result"}


def test_it_stands_on_torch_alone() -> None:
    for name, source in THERE.items():
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("functional"):
                with case(file=name):
                    assert (node.module or "").startswith("functional_optim._torch.")
