"""The console script: typed flags over the same settings."""

import pytest

from server.cli import build_parser, main
from server.settings import Settings


def test_every_setting_has_a_flag(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in text for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--max-num-seq", "3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["--model", "m", "--max-num-seqs", "many"], "M3_MAX_NUM_SEQS"),
        ([], "M3_MODEL"),
    ],
)
def test_a_wrong_flag_is_answered_before_anything_is_loaded(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("M3_MODEL", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
