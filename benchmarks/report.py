"""Rows of a benchmark, the public kernels' figures beside them, and the JSON that is kept."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from benchmarks.timing import Timing

PEERS_FILE = Path(__file__).parent / "peers.json"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured stage of one case.

    Attributes:
        stage: for example "prefill_score".
        case: for example "q8192 ctx128k" or "B8 ctx32k".
        us: median microseconds.
        limit_us: physical limit, see `timing.limit_us`; for a stage that `includes` others, the sum of their limits.
        low_us: lower end of the middle 80 % of samples.
        high_us: its upper end.
        includes: stages that this row's time covers besides its own.
    """

    stage: str
    case: str
    us: float
    limit_us: float
    low_us: float
    high_us: float
    includes: tuple[str, ...] = ()


def make_row(stage: str, case: str, timing: Timing, limit_us: float, includes: Sequence[str] = ()) -> Row:
    """A row from a timing, rounded to what is meaningful."""
    return Row(
        stage,
        case,
        round(timing.us, 2),
        round(limit_us, 3),
        round(timing.low_us, 2),
        round(timing.high_us, 2),
        tuple(includes),
    )


def load_peers() -> dict[str, dict[str, dict[str, float]]]:
    """Published microseconds by stage, case and kernel, measured on the same device model."""
    peers: dict[str, dict[str, dict[str, float]]] = json.loads(PEERS_FILE.read_text())["stages"]
    return peers


def format_row(row: Row, peers: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line: ours with its multiple of the limit, then the best public kernel and how much slower or faster it is."""
    line = f"{row.stage:24s} {row.case:>16s} {row.us:10.1f} us  x{row.us / row.limit_us:<7.2f}"
    known = peers.get(row.stage, {}).get(row.case)
    if known:
        name, us = min(known.items(), key=lambda item: item[1])
        line += f" best public {us:9.1f} us ({name}), {us / row.us:.2f}x ours"
    return line


def measured_with(command: str) -> dict[str, object]:
    """What a result names beside its numbers: command, date and versions."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
    }


def write_json(rows: Sequence[Row], command: str, folder: Path, what: str = "kernels") -> Path:
    """Write rows to `folder`/<what>-<device>.json; rows of stages that were not measured this time stay as they were.

    Every stage names the command, date and versions that it was measured with.
    """
    device = torch.cuda.get_device_name()
    path = folder / f"{what}-{device.lower().replace(' ', '-')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    measured = measured_with(command)
    stages = {row.stage for row in rows}
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "measured": {}}
    result = {
        "device": device,
        "method": "medians; prefill: CUDA events, L2 flushed; decode: CUDA graph over rotating inputs",
        "measured": before["measured"] | dict.fromkeys(sorted(stages), measured),
        "rows": [row for row in before["rows"] if row["stage"] not in stages] + [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
