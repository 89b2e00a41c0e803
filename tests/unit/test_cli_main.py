"""The command `dsserve`: dispatch, and one line with exit code 2 for every user error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsserve.cli import debug
from dsserve.cli.main import COMMANDS, PLANNED, main
from dsserve.config.flag import Kind
from dsserve.config.server import all_flags, spellings

FLAGS = all_flags()
ALL_SPELLINGS = list(spellings())


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments: str) -> str:
    """Run, check the form of a user error, and return its line."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dsserve: error: ")
    assert err.count("\n") == 1
    return err


def typo(spelling: str) -> str:
    """Swap the last two different neighbouring letters."""
    for i in range(len(spelling) - 1, 3, -1):
        if spelling[i] != spelling[i - 1] and "-" not in spelling[i - 1 : i + 1]:
            return spelling[: i - 1] + spelling[i] + spelling[i - 1] + spelling[i + 1 :]
    return spelling + "x"


@pytest.mark.parametrize("spelling", [name for name in ALL_SPELLINGS if len(name) > 5])
def test_a_typo_in_a_flag_is_answered_with_the_flag(capsys, spelling):
    wrong = typo(spelling)
    assert wrong not in ALL_SPELLINGS
    assert f"did you mean {spelling}?" in refused(capsys, "launch", wrong, "1")


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if not flag.works], ids=lambda flag: flag.name
)
def test_each_spelling_of_a_flag_that_does_not_work_yet_is_refused(capsys, flag):
    for spelling in flag.on:
        value = [] if flag.kind is Kind.SWITCH else ["1"]
        assert "does not work yet" in refused(capsys, "launch", spelling, *value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lunch"], "did you mean launch"),
        (["--versoin"], "--version"),
        (["launch", "--port"], "requires an argument"),
        (["launch", "--port="], "is not a whole number"),
        (["launch", "--enable-mixed-chunk=1"], "does not take a value"),
        (["launch", "model"], "--model-path"),
        (["launch", "-p", "1"], "unknown flag -p"),
        (["launch", "--no-enable-mixed-chunk"], "did you mean --enable-mixed-chunk"),
        (["launch", "--page_size", "64"], "did you mean --page-size"),
        (["chat", "--base-ulr", "x"], "--base-url"),
        (["doctor", "--port", "0"], "0"),
        (["debug"], "TOOL"),
        (["debug", "forwards"], "did you mean forward"),
    ],
)
def test_user_errors_are_one_line(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize("name", PLANNED)
def test_planned_commands_are_refused_as_such(capsys, name):
    assert "does not work yet" in refused(capsys, name, "--whatever")


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_help_of_launch_shows_the_working_flags_only(capsys):
    code, out, _ = run(capsys, "launch", "--help")
    assert code == 0
    words = set(out.replace(",", " ").split())
    assert {name for flag in FLAGS if flag.works for name in (*flag.on, *flag.off)} <= words
    assert not words & {name for flag in FLAGS if not flag.works for name in flag.on}


def test_full_help_of_launch_shows_all_flags(capsys):
    code, out, _ = run(capsys, "launch", "--help-all")
    assert code == 0
    assert set(ALL_SPELLINGS) <= set(out.replace(",", " ").split())


def test_version_names_the_package_and_its_dependencies(capsys):
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert out.startswith("dsserve ")
    assert "torch" in out


def test_debug_hands_the_arguments_and_the_exit_code_through(capsys, monkeypatch, tmp_path):
    (tmp_path / "fake_tool.py").write_text(
        "def main(arguments):\n    return len(arguments)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(debug.TOOLS, "forward", "fake_tool")
    assert run(capsys, "debug", "forward", "--help", "-x", "--", "--flag=1")[0] == 4


def test_debug_tool_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(debug.TOOLS, "forward", "dsserve.debug.no_such_module")
    assert "debug forward is not part" in refused(capsys, "debug", "forward")


@pytest.mark.parametrize("module", ["dsserve", "dsserve.launch_server"])
def test_the_modules_run_the_command_line(module):
    arguments = ["launch"] if module == "dsserve" else []
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments, "--prot", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "dsserve: error: unknown flag --prot; did you mean --port?\n"
