"""Does a release answer? `models`, `chat` or `stream`; exits non-zero with a reason when it does not. Standard library only."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

TIMEOUT_S = 60


def call(path, body=None):
    """The open response of one request."""
    made = urllib.request.Request(os.environ["BASE_URL"] + path, None if body is None else json.dumps(body).encode())
    made.add_header("Content-Type", "application/json")
    if keys_file := os.environ.get("KEYS_FILE"):
        made.add_header("Authorization", "Bearer " + Path(keys_file).read_text().split()[0])
    return urllib.request.urlopen(made, timeout=TIMEOUT_S)


def question(**fields):
    """A short chat."""
    return {
        "model": os.environ["MODEL_NAME"],
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 16,
        **fields,
    }


def models():
    """The model's name is listed."""
    with call("/v1/models") as answer:
        names = [model["id"] for model in json.load(answer)["data"]]
    if os.environ["MODEL_NAME"] not in names:
        raise SystemExit(f"{os.environ['MODEL_NAME']} is not among {names}")


def chat():
    """A whole answer has a reason for its end and counts its tokens."""
    with call("/v1/chat/completions", question()) as answer:
        body = json.load(answer)
    if not body["choices"][0]["finish_reason"] or body["usage"]["completion_tokens"] < 1:
        raise SystemExit(f"no answer in {body}")


def stream():
    """Tokens arrive one after the other, not all at once when the answer is complete, and the stream is closed properly."""
    times_s = []
    lines = []
    with call("/v1/chat/completions", question(stream=True, ignore_eos=True, max_tokens=64)) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                lines.append(line)
                times_s.append(time.monotonic())
    if not lines or lines[-1].strip() != b"data: [DONE]":
        raise SystemExit("the stream ended without [DONE]")
    if len({round(moment_s, 3) for moment_s in times_s}) < 3:
        raise SystemExit(f"{len(lines)} events arrived at once: something in between holds the stream back")


if __name__ == "__main__":
    {"models": models, "chat": chat, "stream": stream}[sys.argv[1]]()
    print("ok")
