"""Removed public names, whose errors name the replacement."""

import importlib

import pytest

import hooks.averaging
import hooks.averaging.compression
from tests.choices import case


def test_an_import_names_the_replacement() -> None:
    for module, name, text in [
        ("hooks.averaging", "GossipModelAverager", "import it from hooks.averaging.contrib"),
        ("hooks.averaging", "power_sgd_hook", "import it from hooks.averaging.contrib"),
        ("hooks.averaging", "OUTER_SETTINGS", "OuterModelAverager.*lists published settings"),
        ("hooks.averaging", "slowmo", r"sgd\(lr=1.0, momentum=0.7\)"),
        ("hooks.averaging", "muloco_inner", "by partition, muon and adamw"),
        ("hooks.averaging", "ReplicatedModel", r"LocalWorld\(8\)\.run\(train\)"),
        ("hooks.averaging.compression", "Exact", "compression=None"),
        ("hooks.averaging.compression", "Statistical", "import it from hooks.averaging.contrib"),
    ]:
        with case(name=name), pytest.raises(ImportError, match=f"has no {name} any more: .*{text}"):
            exec(f"from {module} import {name}")


def test_what_was_never_there_is_an_ordinary_error() -> None:
    for module in (hooks.averaging, hooks.averaging.compression):
        assert not hasattr(module, "Nothing")
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute"):
            _ = module.Nothing


def test_what_moved_is_where_it_says() -> None:
    contrib = importlib.import_module("hooks.averaging.contrib")
    for names in (hooks.averaging._GONE, hooks.averaging.compression._GONE):
        moved = [name for name, text in names.items() if text.startswith("import it from")]
        assert moved and all(hasattr(contrib, name) for name in moved)
