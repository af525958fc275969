"""deploy/README.md: its sizes are what the arithmetic gives, its links lead somewhere, its values exist."""

import re

import pytest
import yaml

from tests.deploy.tools import CHART, DEPLOY

README = (DEPLOY / "README.md").read_text()
GIB = 2**30
GPU_BYTES = 139 * GIB
UTILIZATION = 0.9
NUM_LAYERS, NUM_SPARSE_LAYERS, HIDDEN, HEAD_DIM, NUM_KV_HEADS = 60, 57, 6144, 128, 4
# Sizes of the released checkpoints in bytes, and the width of a quantised weight with its scales.
CHECKPOINTS = {"bf16": (854_172_958_720, 2.0), "MXFP8": (443_742_085_120, 33 / 32)}
VISION_BYTES = 2 * (631_185_920 + 45_625_344 + 188_755_968)
ROUTER_BYTES = 4 * 44_833_920
CONTEXTS = (131_072, 524_288, 1_048_576)


def weights_bytes(name, num_gpus):
    """Of one GPU: an even share, and of what every rank keeps whole the rest too."""
    total, width = CHECKPOINTS[name]
    index_k = NUM_SPARSE_LAYERS * HEAD_DIM * HIDDEN * width
    whole = VISION_BYTES + ROUTER_BYTES + index_k
    # Four heads of keys, values and index queries on more ranks than that: each rank keeps one, so several keep the same.
    heads = (2 * NUM_LAYERS + NUM_SPARSE_LAYERS) * NUM_KV_HEADS * HEAD_DIM * HIDDEN * width
    copies = max(1, num_gpus // NUM_KV_HEADS)
    return (total - whole + (copies - 1) * heads) / num_gpus + whole


def token_bytes(num_gpus):
    """Cache of one token on one GPU, bf16: the index keys are on every rank."""
    heads = max(1, NUM_KV_HEADS // num_gpus)
    return 2 * (NUM_LAYERS * 2 * heads * HEAD_DIM + NUM_SPARSE_LAYERS * HEAD_DIM)


def row(name, num_gpus):
    weights = weights_bytes(name, num_gpus)
    cache = GPU_BYTES * UTILIZATION - weights
    tokens = int(cache / token_bytes(num_gpus))
    numbers = [
        f"{weights / GIB:.1f} GiB",
        f"{cache / GIB:.1f} GiB",
        f"{tokens:,}",
        *(str(tokens // length) for length in CONTEXTS),
    ]
    return f"| {name} on {num_gpus} | " + " | ".join(numbers) + " |"


@pytest.mark.parametrize(("name", "num_gpus"), [("bf16", 8), ("MXFP8", 4), ("MXFP8", 8)])
def test_the_sizing_table_is_the_arithmetic(name, num_gpus):
    assert row(name, num_gpus) in README, row(name, num_gpus)


def test_cache_of_a_token_is_the_known_number():
    assert [token_bytes(num_gpus) for num_gpus in (1, 2, 4, 8)] == [137_472, 76_032, 45_312, 45_312]


def test_links_lead_to_files():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 20
    assert [link for link in links if not (DEPLOY / link).exists()] == []


def test_every_runbook_is_in_the_index():
    assert {path.name for path in (DEPLOY / "runbooks").glob("*.md")} == set(re.findall(r"\]\(runbooks/([^)]+)\)", README))


def test_values_that_the_text_names_exist():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = [name for name in re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z_]+)+)`", README) if name.split(".")[0] in values]
    assert len(named) > 15
    for name in named:
        section = values
        for part in name.split("."):
            assert part in section or name.startswith("settings."), name
            section = section.get(part, {})
