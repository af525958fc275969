"""deploy/README.md: its links lead somewhere, its values exist. Its sizes are tested with the plan."""

import re

import yaml

from tests.deploy.tools import CHART, DEPLOY

README = (DEPLOY / "README.md").read_text()


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
