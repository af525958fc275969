import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def start(**environment):
    """The exit of a process that imports the application."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("M3_")}
    clean |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", "import sys, server.main; assert 'torch' not in sys.modules"]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "M3_MODEL"),
        ({"M3_MODLE": "x"}, "did you mean M3_MODEL?"),
        ({"M3_MODEL": "x", "M3_MAX_NUM_SEQS": "many"}, "M3_MAX_NUM_SEQS"),
    ],
)
def test_settings_that_cannot_be_used_end_the_process_with_one_line(environment, expected):
    result = start(**environment)
    assert result.returncode == 2
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_application_is_made_without_torch_and_without_a_model():
    result = start(M3_MODEL="nowhere")
    assert result.returncode == 0, result.stderr
