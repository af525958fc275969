"""`m3-server`: serve a checkpoint, plan a deployment, check a checkpoint.

`serve` has the settings as typed flags and starts uvicorn with the same application as `uvicorn server.main:app`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from server import __version__
from server.settings import PREFIX, Settings, SettingsError, load_settings, nearest

GIB = 1 << 30


def build_parser() -> argparse.ArgumentParser:
    """Of `serve`, one flag per setting, named like it with dashes; values stay text until the settings validate them."""
    parser = argparse.ArgumentParser(prog="m3-server", description="Inference server for MiniMax-M3.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve a checkpoint over HTTP", allow_abbrev=False))
    _add_plan(commands.add_parser("plan", help="compute what a number of GPUs holds", allow_abbrev=False))
    _add_check(commands.add_parser("check", help="verify a checkpoint without loading it", allow_abbrev=False))
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    for name, field in Settings.model_fields.items():
        default = "" if field.is_required() or field.default in (None, ()) else f" (default {field.default})"
        serve.add_argument(flag(name), dest=name, default=None, metavar="VALUE", help=f"{field.description}{default}")
    serve.set_defaults(run=_serve)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    defaults = {name: Settings.model_fields[name].default for name in ("gpu_memory_utilization", "max_num_seqs")}
    plan.add_argument("--model", default="M3", help="directory of a checkpoint, or M3 for the released model (default M3)")
    plan.add_argument("--gpus", type=_positive, required=True, help="GPUs that share the model")
    plan.add_argument("--gpu-memory", type=_gib, required=True, metavar="GIB", help="memory of one GPU")
    plan.add_argument("--context", type=_positive, help="longest sequence in tokens; what fits if unset")
    plan.add_argument("--dtype", choices=["bf16", "mxfp8"], help="of the weights; as the model says if unset")
    plan.add_argument("--host-memory", type=_gib, metavar="GIB", help="of all GPUs' hosts for cache pages; unbounded if unset")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--gpu-memory-utilization", type=_share, default=defaults["gpu_memory_utilization"], metavar="SHARE")
    plan.add_argument("--max-num-seqs", type=_positive, default=defaults["max_num_seqs"])
    plan.add_argument("--max-num-batched-tokens", type=_positive, default=8192)
    plan.add_argument("--media-feature-cache-bytes", type=int, default=GIB)
    plan.set_defaults(run=_plan)


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("model", type=Path, metavar="DIR", help="directory of the checkpoint")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_check)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _gib(text: str) -> int:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of GiB")
    return int(value * GIB)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def flag(name: str) -> str:
    """The flag of a setting: `max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = ["--host", "--port", *map(flag, Settings.model_fields)] if arguments.command == "serve" else []
        option = unknown[0].partition("=")[0]
        parser.error(f"unknown option {option}{nearest(option, valid)}")
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int] = arguments.run
    return run(arguments, parser)


def _serve(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    values = {name: getattr(arguments, name) for name in Settings.model_fields if getattr(arguments, name) is not None}
    try:
        load_settings(values)
    except SettingsError as error:
        parser.error(str(error))
    os.environ.update({PREFIX + name.upper(): value for name, value in values.items()})

    import uvicorn  # after the checks: a wrong flag is answered at once

    uvicorn.run("server.main:app", host=arguments.host, port=arguments.port, log_level="info")
    return 0


def _plan(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from server.plan import PlanRequest, WeightFormat, run

    request = PlanRequest(
        model=arguments.model,
        num_gpus=arguments.gpus,
        gpu_bytes=arguments.gpu_memory,
        context=arguments.context,
        dtype=None if arguments.dtype is None else WeightFormat(arguments.dtype),
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        feature_cache_bytes=arguments.media_feature_cache_bytes,
        host_bytes=arguments.host_memory,
    )
    return run(request, prints_json=arguments.json)


def _check(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from server.check.report import run

    return run(arguments.model, prints_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
