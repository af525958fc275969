import json

import pytest

from benchmarks import serve
from benchmarks.serve_load import Answer, Level, LoadError, read_stream
from benchmarks.serve_report import Spread, format_row, percentile, row_of


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content, name="content"):
    return event(choices=[{"delta": {name: content}}])


def test_percentiles_are_interpolated():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1
    assert percentile(values, 50) == 2.5
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile(values, 100) == 4
    assert percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_an_answer_is_timed_by_its_texts():
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    usage = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 5})
    reads = [
        (1.0, role),
        (2.0, text("a", "reasoning_content")),
        (2.5, text("b") + text("c")),
        (4.0, usage + b"data: [DONE]\n\n"),
    ]
    answer = read_stream(0.5, reads)
    assert answer == Answer(0.5, (2.0, 2.5, 2.5), 11, 5)
    assert answer.ttft_s == 1.5
    assert answer.tpot_s == 0.125
    assert answer.gaps_s == [0.5, 0.0]


def test_a_piece_counts_when_its_last_byte_came():
    piece = text("a")
    answer = read_stream(0.0, [(1.0, piece[:9]), (2.0, piece[9:])])
    assert answer.text_s == (2.0,)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.tpot_s) == (None, 1, None)


def test_a_stream_without_text_or_with_an_error_does_not_count():
    with pytest.raises(LoadError, match="without text"):
        read_stream(0.0, [(1.0, b"data: [DONE]\n\n")])
    with pytest.raises(LoadError, match="busy"):
        read_stream(0.0, [(1.0, event(error={"message": "busy"}))])


def test_a_level_is_summed_up():
    answers = (Answer(0.0, (1.0, 1.1, 1.2), 10, 3), Answer(1.0, (1.5, 1.7), 12, 2))
    row = row_of("ours", 2, Level(answers, ("LoadError: 500",), seconds=2.0, client_cpu=0.25))
    assert (row.num_requests, row.num_errors, row.prompt_tokens, row.output_tokens) == (2, 1, 11, 2.5)
    assert row.ttft_ms == Spread(750.0, 995.0)
    assert row.tpot_ms.p50 == pytest.approx(150)
    assert row.itl_ms.p50 == pytest.approx(100)
    assert row.output_tokens_per_s == 2.5
    assert "LoadError: 500" in format_row(row)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_server_with_a_slice_is_measured(tmp_path, monkeypatch, request):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "serve.json"
    config = request.config.rootpath / "server/model/tiny/config.json"
    sizes = "--concurrency 1,2 --input-len 180 --output-len 6 --rounds 1 --slice 1+1 --mxfp8"
    serve.main([*sizes.split(), "--config", str(config), "--out", str(out)])
    result = json.loads(out.read_text())
    assert [row["concurrency"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert (row["num_requests"], row["num_errors"], row["output_tokens"]) == (8, 0, 6)
        assert row["prompt_tokens"] == pytest.approx(180, abs=15)
        assert 0 < row["tpot_ms"]["p50"] <= row["tpot_ms"]["p99"]
    assert "--concurrency 1,2" in result["command"]
