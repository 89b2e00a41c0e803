"""The documents tell the truth where that can be checked: links, flags, make targets, endpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsserve.config.server import spellings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Flags of other commands than `dsserve launch`.
OTHER_FLAGS = {
    *("--help", "--help-all", "--base-url", "--version", "--prompts", "--out"),
    *("--golden", "--beside-checkout", "--cuda-graph"),
}


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def text(request):
    return request.param.read_text(encoding="utf-8"), request.param


def test_links_lead_somewhere(text):
    content, path = text
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", content) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_flags_exist(text):
    content, _ = text
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", content))
    assert flags - set(spellings()) - OTHER_FLAGS == set()


def test_variables_exist(text):
    content, _ = text
    known = {"DSSERVE_" + name[2:].replace("-", "_").upper() for name in spellings()}
    known |= {"DSSERVE_GOLDEN", "DSSERVE_SYNC_GUARD", "DSSERVE_"}
    assert set(re.findall(r"DSSERVE_[A-Z_]*(?<!\*)", content)) - known == set()


def test_make_targets_exist(text):
    content, _ = text
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", content)) - targets == set()


def test_endpoints_of_the_api_document_are_served():
    routes = set()
    for path in (ROOT / "python" / "dsserve" / "entrypoints").rglob("*.py"):
        routes |= set(
            re.findall(r'@router\.(?:get|post)\(\s*"(/[^"{]*)', path.read_text(encoding="utf-8"))
        )
    table = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n## ")[1]
    documented = {path.split("{")[0] for path in re.findall(r"(/[a-z_/0-9]+)[`{ ,]", table)}
    assert len(documented) > 12
    assert documented - {"/v1", "/openapi", "/operations"} <= routes
