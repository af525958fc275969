"""Fetch a checkpoint from a hub and verify every file, or wait until that is done. Standard library only.

`fetch FOLDER` writes to FOLDER/REVISION.partial, resumes what a former run left, compares sizes and hashes with what the hub
announces, and renames the folder when all is right. `wait FOLDER` returns when FOLDER/REVISION/.complete names the same
checkpoint. Repository and revision come from MODEL_REPOSITORY and MODEL_REVISION.
"""

import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

CHUNK_BYTES = 8 << 20
TIMEOUT_S = 60
WAIT_PERIOD_S = 5
MARK = ".complete"


def request(url, first_byte=0):
    """A request with the hub's token, which a redirect to another host must not see."""
    made = urllib.request.Request(url)
    if first_byte:
        made.add_header("Range", f"bytes={first_byte}-")
    if token_file := os.environ.get("MODEL_TOKEN_FILE"):
        made.add_unredirected_header("Authorization", "Bearer " + Path(token_file).read_text().strip())
    return urllib.request.urlopen(made, timeout=TIMEOUT_S)


def listing(endpoint, repository, revision):
    """Name, size and hash of every file of the revision."""
    with request(f"{endpoint}/api/models/{repository}/revision/{revision}?blobs=true") as answer:
        info = json.load(answer)
    if info["sha"] != revision:
        raise SystemExit(f"the hub answered with revision {info['sha']} instead of {revision}")
    return info["siblings"]


def digest(path, file):
    """The file's hash in the hub's way: sha256 of large files, git's blob id of the others."""
    blob_head = b"blob %d\0" % path.stat().st_size
    hasher = hashlib.sha256() if "lfs" in file else hashlib.sha1(blob_head, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def fetch_file(url, path, file):
    """Fetch what is missing of one file; a file that is wrong afterwards is removed and fails the run."""
    size = file["size"]
    path.parent.mkdir(parents=True, exist_ok=True)
    present = path.stat().st_size if path.exists() else 0
    if present > size:
        path.unlink()
        present = 0
    if present < size:
        with request(url, present) as answer:
            is_resumed = present and answer.status == 206
            with path.open("ab" if is_resumed else "wb") as stream:
                while chunk := answer.read(CHUNK_BYTES):
                    stream.write(chunk)
    elif size == 0:
        path.touch()
    if path.stat().st_size < size:
        raise SystemExit(f"{file['rfilename']}: the connection ended early; the next run goes on from there")
    expected = file["lfs"]["sha256"] if "lfs" in file else file["blobId"]
    if path.stat().st_size != size or digest(path, file) != expected:
        path.unlink()
        raise SystemExit(f"{file['rfilename']}: size or hash differs from what the hub announces; removed")


def fetch(folder, repository, revision):
    """Fill the folder of the revision."""
    target = folder / revision
    mark = json.dumps({"repository": repository, "revision": revision})
    if (target / MARK).exists():
        check_mark(target / MARK, mark)
        print("complete already")
        return
    endpoint = os.environ["MODEL_ENDPOINT"].rstrip("/")
    partial = folder / f"{revision}.partial"
    files = listing(endpoint, repository, revision)
    for number, file in enumerate(files, 1):
        name = file["rfilename"]
        path = partial / name
        if partial.resolve() not in path.resolve().parents:
            raise SystemExit(f"{name}: not a name within the folder")
        fetch_file(f"{endpoint}/{repository}/resolve/{revision}/{urllib.parse.quote(name)}", path, file)
        print(f"{number}/{len(files)} {name}: {file['size']} bytes, verified", flush=True)
    (partial / MARK).write_text(mark)
    partial.rename(target)
    print("complete")


def check_mark(path, mark):
    """Another repository's files under the same revision are no substitute."""
    if path.read_text() != mark:
        raise SystemExit(f"{path} says {path.read_text()}, expected {mark}")


def wait(folder, repository, revision):
    """Return when the folder is complete."""
    path = folder / revision / MARK
    while not path.exists():
        print(f"waiting for {path}", flush=True)
        time.sleep(WAIT_PERIOD_S)
    check_mark(path, json.dumps({"repository": repository, "revision": revision}))


if __name__ == "__main__":
    action = {"fetch": fetch, "wait": wait}[sys.argv[1]]
    try:
        action(Path(sys.argv[2]), os.environ["MODEL_REPOSITORY"], os.environ["MODEL_REVISION"])
    except (urllib.error.URLError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
