"""`m3-server serve`: the settings as typed flags, then uvicorn with the same application as `uvicorn server.main:app`."""

import argparse
import os
import sys
from collections.abc import Sequence

from server import __version__
from server.settings import PREFIX, Settings, SettingsError, load_settings, nearest


def build_parser() -> argparse.ArgumentParser:
    """One flag per setting, named like it with dashes; values stay text until the settings validate them."""
    parser = argparse.ArgumentParser(prog="m3-server", description="Inference server for MiniMax-M3.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a checkpoint over HTTP", allow_abbrev=False)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    for name, field in Settings.model_fields.items():
        default = "" if field.is_required() or field.default in (None, ()) else f" (default {field.default})"
        serve.add_argument(flag(name), dest=name, default=None, metavar="VALUE", help=f"{field.description}{default}")
    return parser


def flag(name: str) -> str:
    """The flag of a setting: `max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        valid = ["--host", "--port", *map(flag, Settings.model_fields)]
        option = unknown[0].partition("=")[0]
        parser.error(f"unknown option {option}{nearest(option, valid)}")
    values = {name: getattr(arguments, name) for name in Settings.model_fields if getattr(arguments, name) is not None}
    try:
        load_settings(values)
    except SettingsError as error:
        parser.error(str(error))
    os.environ.update({PREFIX + name.upper(): value for name, value in values.items()})

    import uvicorn  # after the checks: a wrong flag is answered at once

    uvicorn.run("server.main:app", host=arguments.host, port=arguments.port, log_level="info")
    return 0


if __name__ == "__main__":
    sys.exit(main())
