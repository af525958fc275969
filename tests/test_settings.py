"""Settings: one source of names, every mistake named."""

from pathlib import Path

import pytest

from server.settings import Device, Settings, SettingsError, load_settings


def test_environment_is_read_with_its_types():
    settings = load_settings(environ={"M3_MODEL": "/models/m3", "M3_DEVICE": "cpu", "M3_MAX_NUM_SEQS": "8", "PATH": "/bin"})
    assert (settings.model, settings.device, settings.max_num_seqs) == (Path("/models/m3"), Device.CPU, 8)


def test_flags_win_over_the_environment():
    assert load_settings({"max_num_seqs": "3"}, {"M3_MODEL": "m", "M3_MAX_NUM_SEQS": "8"}).max_num_seqs == 3


def test_only_the_given_environment_is_read(monkeypatch):
    monkeypatch.setenv("M3_MAX_NUM_SEQS", "3")
    assert load_settings(environ={"M3_MODEL": "m"}) == Settings(model=Path("m"))
    assert load_settings(environ={"M3_MODEL": "m"}).max_num_seqs == 64
    assert load_settings({"model": "m"}).max_num_seqs == 3


def test_misspelt_variable_names_the_nearest_setting():
    with pytest.raises(SettingsError, match=r"M3_MAX_NUM_SEQ: no such setting; did you mean M3_MAX_NUM_SEQS\?"):
        load_settings(environ={"M3_MODEL": "m", "M3_MAX_NUM_SEQ": "8"})


def test_unknown_flag_value_names_the_nearest_setting():
    with pytest.raises(SettingsError, match=r"media_worker: no such setting; did you mean media_workers\?"):
        load_settings({"media_worker": 1}, {"M3_MODEL": "m"})


def test_all_faults_come_in_one_message():
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={"M3_MAX_NUM_SEQS": "none", "M3_COLOUR": "red", "M3_DEVICE": "tpu"})
    message = str(caught.value)
    for part in ("M3_COLOUR: no such setting", "M3_MODEL", "M3_MAX_NUM_SEQS", "M3_DEVICE"):
        assert part in message


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", 0), ("gpu_memory_utilization", 1.5), ("media_task_timeout_s", -1)]
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(SettingsError, match=name.upper()):
        load_settings({name: value}, {"M3_MODEL": "m"})


def test_settings_cannot_be_changed():
    settings = load_settings(environ={"M3_MODEL": "m"})
    with pytest.raises(ValueError, match="frozen"):
        settings.max_num_seqs = 3


def test_model_name_is_the_directory_unless_set(tmp_path):
    assert load_settings({"model": tmp_path / "m3"}, {}).model_name == "m3"
    assert load_settings({"model": tmp_path, "served_model_name": "x"}, {}).model_name == "x"


def test_every_setting_says_what_it_is():
    assert all(field.description for field in Settings.model_fields.values())
