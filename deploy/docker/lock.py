"""Write requirements-cuda.lock and requirements-cpu.lock: exact versions and hashes of what the image installs.

Run it with the image's Python (CPython 3.11 on Linux x86_64) after a dependency changed: `python deploy/docker/lock.py`. pip
resolves pyproject.toml's dependencies under constraints.txt without installing anything. For the CPU variant pip must know
where CPU builds of torch are: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = "# Made by deploy/docker/lock.py for CPython 3.11 on Linux x86_64; install with --no-deps --require-hashes."


def resolve(constraints: list[str], environment: dict[str, str]) -> list[str]:
    """One line per package: name, version, hash."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder, "constraints.txt")
        limits.write_text("\n".join(constraints))
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", f"--report={report}"]
        subprocess.run([*command, f"--constraint={limits}", *dependencies], env=environment, check=True)
        packages = json.loads(report.read_text())["install"]
    lines = []
    for package in packages:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}")
    return sorted(lines, key=str.lower)


def main() -> None:
    """Resolve both variants."""
    if sys.version_info[:2] != (3, 11):
        raise SystemExit("the image has Python 3.11: run this with it")
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    # torch's CUDA build from the package index asks for exactly one version of Triton.
    without_triton = [line for line in constraints if not line.startswith("triton==")]
    cuda = {name: value for name, value in os.environ.items() if not name.startswith("PIP_FIND")} | {
        "PIP_CONFIG_FILE": os.devnull
    }
    variants = (("cuda", without_triton, cuda), ("cpu", constraints, dict(os.environ)))
    for name, limits, environment in variants:
        path = Path(__file__).with_name(f"requirements-{name}.lock")
        path.write_text("\n".join([HEAD, *resolve(limits, environment)]) + "\n")


if __name__ == "__main__":
    main()
