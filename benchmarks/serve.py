"""A real server under an OpenAI client's load: `python -m benchmarks.serve [--model FOLDER | --slice 1+2 | --url URL]`.

Starts `m3-server serve` with the tiny checkpoint, a given one, or a slice at true width with random weights; or asks any
server that speaks the OpenAI protocol. Prints TTFT, TPOT, ITL and tokens per second per concurrency and writes JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.report import RESULTS, measured_with
from benchmarks.serve_load import LoadError, Prompts, Target, run_level
from benchmarks.serve_process import ours, transformers
from benchmarks.serve_report import HEADER, ServeRow, format_row, row_of
from benchmarks.slice_checkpoint import write_checkpoint
from benchmarks.slices import RELEASED_CONFIG, Layers, slice_values
from benchmarks.transformers_folder import write_text_folder

TINY = Path(__file__).parents[1] / "server" / "model" / "tiny"
WARM_UP_TOKENS = 8


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Put a server under an OpenAI client's load.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--url", help="a server that runs already, without /v1")
    source.add_argument("--model", type=Path, default=TINY, help="folder to serve; the tiny checkpoint if unset")
    source.add_argument("--slice", help="serve a slice of so many dense+sparse layers with random weights")
    parser.add_argument("--config", type=Path, default=RELEASED_CONFIG, help="widths of the slice")
    parser.add_argument("--mxfp8", action="store_true", help="quantise the slice")
    parser.add_argument("--transformers", action="store_true", help="also measure `transformers serve` with the same weights")
    parser.add_argument("--only-transformers", action="store_true", help="measure nothing else")
    parser.add_argument("--served-name", help="model in requests to --url; the first one it lists if unset")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--input-len", type=int, default=1024, help="tokens of a prompt, about, with the template")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=4, help="requests per level: so many times its concurrency, at least 8")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of our server, repeatable")
    parser.add_argument("--transformers-option", action="append", default=[], help="of `transformers serve`, repeatable")
    parser.add_argument("--folder", type=Path, help="where a slice is written; a temporary folder if unset")
    parser.add_argument("--out", type=Path, help="JSON file; results/serve-<device>.json if unset")
    return parser.parse_args(argv)


async def sweep(name: str, target: Target, arguments: argparse.Namespace) -> list[ServeRow]:
    """All levels of one server; each begins with a few short requests that do not count."""
    rows = []
    async with target.client() as client:
        prompts = await Prompts.calibrated(client, target, arguments.input_len)
        for concurrency in map(int, arguments.concurrency.split(",")):
            await run_level(client, target, prompts, concurrency, concurrency, WARM_UP_TOKENS)
            num_requests = max(8, arguments.rounds * concurrency)
            level = await run_level(client, target, prompts, concurrency, num_requests, arguments.output_len)
            rows.append(row_of(name, concurrency, level))
            print(format_row(rows[-1]), flush=True)
    return rows


def first_model(url: str, api_key: str | None) -> str:
    """The first model that a server lists.

    Raises:
        LoadError: it lists none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    response = httpx.get(f"{url}/v1/models", headers=headers, timeout=60.0)
    models = response.json().get("data") if response.status_code == 200 else None
    if not models:
        raise LoadError(f"{url}/v1/models: {response.status_code}")
    return str(models[0]["id"])


@contextlib.contextmanager
def folder_of(arguments: argparse.Namespace, scratch: Path) -> Iterator[Path]:
    """The checkpoint to serve; a slice is written first."""
    if not arguments.slice:
        yield arguments.model
        return
    num_dense, num_sparse = map(int, arguments.slice.split("+"))
    values = slice_values(arguments.config, Layers(num_dense, num_sparse), quantized=arguments.mxfp8)
    values["vision_config"]["num_hidden_layers"] = 1
    folder = arguments.folder or scratch / "slice"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_checkpoint(folder, values, device, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yield folder


def measure(arguments: argparse.Namespace) -> list[ServeRow]:
    """The rows of all servers that were asked for."""
    extra: dict[str, Any] = {"ignore_eos": True}
    if arguments.url:
        model = arguments.served_name or first_model(arguments.url, arguments.api_key)
        target = Target(arguments.url, model, extra, arguments.api_key)
        return asyncio.run(sweep(arguments.url.rsplit("/", 1)[-1], target, arguments))
    rows: list[ServeRow] = []
    with tempfile.TemporaryDirectory() as scratch, folder_of(arguments, Path(scratch)) as folder:
        if not arguments.only_transformers:
            largest = max(map(int, arguments.concurrency.split(",")))
            settings = {"max_num_seqs": str(largest)} | dict(part.split("=", 1) for part in arguments.setting)
            with ours(folder, Path(scratch) / "ours.log", settings) as server:
                target = Target(server.url, first_model(server.url, None), extra)
                rows += asyncio.run(sweep("m3-server", target, arguments))
        if arguments.transformers or arguments.only_transformers:
            text_folder = Path(scratch) / "text"
            write_text_folder(folder, text_folder)
            with transformers(text_folder, Path(scratch) / "transformers.log", arguments.transformers_option) as server:
                rows += asyncio.run(sweep("transformers", Target(server.url, str(text_folder)), arguments))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    arguments = parse(argv)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(HEADER)
    rows = measure(arguments)
    path = arguments.out or RESULTS / f"serve-{device.lower().replace(' ', '-')}.json"
    command = " ".join(["python -m benchmarks.serve", *(sys.argv[1:] if argv is None else argv)])
    machine = f"{os.cpu_count()} x {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end"
    result = {"device": device, "machine": machine, **measured_with(command), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
