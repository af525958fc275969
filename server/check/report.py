"""The whole check, and its report for people and machines.

Every finding is reported, not just the first; what is checked is what the server does with the folder when it starts.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from server.check.chat import check_generation, check_template, check_tokenizer
from server.check.findings import Area, Finding, Level
from server.check.preprocessor import check_preprocessors
from server.check.tensors import Summary, check_tensors
from server.model.config import ConfigError, M3Config
from server.model.stored_file import FileFault, UnusableFileError, read_bytes
from server.sizing import size

_MAX_LISTED = 20
_SMALL_FILES = {
    "config.json": Area.CONFIG,
    "tokenizer.json": Area.TOKENIZER,
    "tokenizer_config.json": Area.TOKENIZER,
    "generation_config.json": Area.GENERATION,
    "chat_template.jinja": Area.TEMPLATE,
    "preprocessor_config.json": Area.PREPROCESSOR,
}


@dataclass(frozen=True)
class Report:
    """The result; `summary` is None when config or tensors are at fault."""

    findings: tuple[Finding, ...]
    summary: Summary | None

    @property
    def is_sound(self) -> bool:
        """Whether the checkpoint can be served."""
        return all(finding.level is not Level.ERROR for finding in self.findings)


def check(model_dir: Path) -> Report:
    """Look at everything in `model_dir` that a server reads."""
    config: M3Config | None = None
    summary: Summary | None = None
    findings = list(_check_pointers(model_dir))
    try:
        config = M3Config.from_file(model_dir)
    except ConfigError as error:
        findings.append(Finding(Level.ERROR, Area.CONFIG, str(error)))
    else:
        found, summary = check_tensors(model_dir, config)
        findings += found
    for part in (check_tokenizer, check_generation, check_template, check_preprocessors):
        findings += part(model_dir, config)
    return Report(tuple(findings), summary)


def _check_pointers(model_dir: Path) -> Iterator[Finding]:
    """A clone without Git LFS has pointers where files should be, also of small ones."""
    for file_name, area in _SMALL_FILES.items():
        try:
            read_bytes(model_dir / file_name)
        except UnusableFileError as error:
            if error.fault is FileFault.LFS_POINTER:
                yield Finding(Level.ERROR, area, f"{file_name} is a Git-LFS pointer instead of the file")


def report_lines(model_dir: Path, report: Report) -> Iterator[str]:
    """The report for people; long lists are cut."""
    if (summary := report.summary) is not None:
        yield (
            f"{model_dir}: {summary.format}, {summary.num_tensors:,} tensors, {size(summary.num_bytes)}, "
            f"files: {summary.num_files}, window: {summary.window:,} tokens"
        )
    for (level, area), group in groupby(report.findings, key=lambda finding: (finding.level, finding.area)):
        texts = [finding.text for finding in group]
        yield from (f"{level.value}: {area.value}: {text}" for text in texts[:_MAX_LISTED])
        if len(texts) > _MAX_LISTED:
            yield f"{level.value}: {area.value}: and {len(texts) - _MAX_LISTED:,} more (--json lists all)"
    yield "the checkpoint can be served" if report.is_sound else "the checkpoint cannot be served"


def as_json(report: Report) -> str:
    """The report for machines."""
    return json.dumps({"ok": report.is_sound, **dataclasses.asdict(report)}, indent=2)


def run(model_dir: Path, *, prints_json: bool) -> int:
    """Print the report; returns the exit code."""
    report = check(model_dir)
    print(as_json(report) if prints_json else "\n".join(report_lines(model_dir, report)))
    return 0 if report.is_sound else 1
