"""Plugins are imported on every start of the command line: they must cost next to nothing."""

import subprocess
import sys
from importlib.metadata import entry_points

HEAVY = ("torch", "transformers", "accelerate", "numpy", "safetensors", "modelquirks.planner")
PLUGINS = sorted(
    entry.value
    for entry in entry_points(group="modelquirks")
    if entry.value.startswith("modelquirks.plugins.")
)


def test_importing_all_plugins_and_asking_for_records_imports_nothing_heavy() -> None:
    code = f"""
import sys
from importlib import import_module
records = []
for name in {PLUGINS!r}:
    plugin = import_module(name)
    records += getattr(plugin, "modelquirks_records", tuple)()
    list(getattr(plugin, "modelquirks_schemes", tuple)())
assert len(records) == len({{record.name for record in records}}) > 40
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
