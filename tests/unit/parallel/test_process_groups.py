"""If this fails, process groups are made in several places, and ranks may make them in different orders."""

import ast
from pathlib import Path

import xgram_dist

PACKAGE = Path(xgram_dist.__file__).parent
MAKERS = {"new_group", "init_process_group", "from_group", "init_device_mesh", "new_subgroups"}


def test_process_groups_are_made_in_the_mesh_alone():
    makers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in MAKERS:
                makers.add(str(path.relative_to(PACKAGE)))
    assert makers == {"parallel/mesh.py"}
