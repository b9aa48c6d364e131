"""The page about configuration has a row for each setting, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from pagemesh.cli.mesh.up_config import UpConfig
from pagemesh.runtime.config import Secret, options
from pagemesh.runtime.settings import CONFIGS

PAGE = Path(__file__).parents[3] / "ops/docs/configuration.md"
ROW = re.compile(r"^\|([^|]*)\|((?: `PAGEMESH_[A-Z_]+`,?)+) \|[^|]+\|[^|]+\|$", re.MULTILINE)
READ_WITHOUT_A_SETTING = {"PAGEMESH_COMPILED"}
"""It says which code reads the settings."""


def test_each_setting_has_a_row_with_its_flag() -> None:
    named: dict[str, str] = {}
    for row in ROW.finditer(PAGE.read_text()):
        flags, variables = (re.findall(r"`([^`]+)`", cell) for cell in row.groups())
        for index, variable in enumerate(variables):
            assert variable not in named, f"{variable} has two rows"
            named[variable] = flags[index] if flags else ""
    found = [one for kind in (*CONFIGS, UpConfig) for one in options(kind)]
    wanted = {one.variable: "" if one.kind is Secret else one.flag for one in found}
    assert named == wanted | dict.fromkeys(READ_WITHOUT_A_SETTING, "")
